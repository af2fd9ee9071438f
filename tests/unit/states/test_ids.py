"""Content-defined cuts between shards."""

import numpy as np
import pytest

from aerie.states.ids import group_records


def groups(ids, mean=16):
    return [tuple(ids[i] for i in g) for g in group_records(ids, mean)]


def test_groups_hold_every_record_once_within_their_bounds():
    ids = [f"record-{i}" for i in range(3000)]
    found = groups(ids)
    assert [i for g in found for i in g] == ids
    assert all(4 <= len(g) <= 64 for g in found[:-1])
    assert 10 < np.mean([len(g) for g in found]) < 30


@pytest.mark.parametrize("edit", ["change", "remove", "insert"])
def test_an_edit_in_the_middle_changes_at_most_two_groups(edit):
    ids = [f"record-{i}" for i in range(5000)]
    before = set(groups(ids))
    for position in (17, 1234, 2500, 4990):
        edited = list(ids)
        if edit == "change":
            edited[position] = "another"
        elif edit == "remove":
            del edited[position]
        else:
            edited.insert(position, "another")
        assert len(set(groups(edited)) - before) <= 2


def test_appending_changes_only_the_last_group():
    ids = [f"record-{i}" for i in range(1400)]
    lost = set(groups(ids[:1000])) - set(groups(ids))
    assert len(lost) <= 1
