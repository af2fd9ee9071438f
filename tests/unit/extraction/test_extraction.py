"""A lane with a stand-in for the engine, so that each fault can be forced."""

import concurrent.futures
import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from aerie.common.errors import InputError, UnusableStates
from aerie.common.leases import Leases, lease_path
from aerie.engine import staging
from aerie.engine.in_process import EngineDied
from aerie.extraction import lane as extraction
from aerie.extraction.lane import LaneWork, describe_lane
from aerie.states import facts as shard_facts
from aerie.states import store as states_store
from aerie.states.manifest import broken_shards
from aerie.states.room import check_room, measured_ratio
from aerie.states.shard import Sample, Shard
from support.lanes import (
    WIDTH,
    Lane,
    nearly,
    right,
    rows,
    true_states,
)
from support.paths import ROOT, SCRIPTS


@pytest.fixture
def lane(tmp_path):
    return Lane(tmp_path, rows(60))


def test_a_lane_fills_its_shards_and_finds_them_the_next_time(lane):
    manifest = lane.run()
    assert manifest["samples"] == 60 == manifest["extracted_samples"]
    assert right(lane)
    assert not list(lane.folder.iterdir())
    again = lane.run()
    assert lane.engine.started == 0
    assert {**again, "extracted_samples": 60} | {"extracted_tokens": 0} == {
        **manifest,
        "extracted_tokens": 0,
    }


FAULTS = {
    "engine error": lambda s: "the engine refuses it",
    "zeros": torch.zeros_like,
    "half of it zeros": lambda s: torch.cat([s[..., : WIDTH // 2], 0 * s[..., WIDTH // 2 :]], -1),
    "constant": lambda s: torch.full_like(s, 0.5),
    "nan": lambda s: s * float("nan"),
    "infinity": lambda s: s * float("inf"),
    "short": lambda s: s[:-1],
    "shifted": lambda s: s.roll(1, 0),
    "another's": lambda s: true_states(list(range(len(s)))),
    "repeated": lambda s: s[:1].expand_as(s),
    "of other layers": lambda s: s.roll(1, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_that_fails_once_is_tried_again_alone(lane, fault):
    spoil = FAULTS[fault]
    manifest = lane.run(lambda n, key, s: spoil(s) if key == "s30" else s)
    assert manifest["quarantined"] == {}
    assert lane.engine.alone[-1] == "s30-again" or "s30-again" in lane.engine.alone
    assert len(lane.read()) == 60
    assert right(lane)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_that_always_fails_is_left_out_with_its_reason(lane, fault):
    spoil = FAULTS[fault]

    def always(n, key, states):
        return spoil(states) if key.split("-")[0] in ("s0", "s30") else states

    manifest = lane.run(always)
    assert set(manifest["quarantined"]) == {"s0", "s30"}
    assert all(manifest["quarantined"].values())
    assert manifest["samples"] == 58 == len(lane.read())
    assert right(lane)
    # The reason is there the next time too, and the sample is not tried for ever.
    again = lane.run(always)
    assert again["quarantined"] == manifest["quarantined"]
    assert lane.engine.started == 0


def refusing(*shards):
    """A `spoil` that lets every sample of these shards fail."""
    lost = {i for shard in shards for i in shard["samples"]}
    return lambda n, key, states: "no" if key.removesuffix("-again") in lost else states


def test_a_shard_of_which_nothing_could_be_kept_is_remembered(lane):
    manifest = lane.run(refusing(lane.shards[1]), floor=0.8)
    assert manifest["quarantined"] == dict.fromkeys(lane.shards[1]["samples"], "no")
    assert manifest["samples"] == 48
    assert not list(lane.store.folder.glob(".*.lease"))
    again = lane.run(refusing(lane.shards[1]), floor=0.8)
    assert lane.engine.started == 0
    assert again["quarantined"] == manifest["quarantined"]
    assert again["samples"] == 48
    check_room(lane.store, 0, 0.0)
    assert all(states_store.is_done(lane.store, s["id"]) for s in lane.shards)


@pytest.mark.parametrize("lost", ["a sample", "a shard"])
def test_what_was_left_out_is_tried_again_when_its_facts_are_deleted(lane, lost):
    """The way that docs/runbook.md gives: for parts of shards and for whole ones the same."""

    def one(n, key, states):
        return "no" if key.startswith("s17") else states

    lane.run(one if lost == "a sample" else refusing(lane.shards[1]), floor=0.8)
    command = r"grep -L '\"left_out\": {}' *.json | xargs -r rm"
    subprocess.run(command, shell=True, cwd=lane.store.folder, check=True)
    manifest = lane.run()
    assert manifest["quarantined"] == {}
    assert manifest["samples"] == 60 == len(lane.read())
    assert set(lane.engine.asked) == set(lane.shards[1]["samples"])
    lane.run()
    assert lane.engine.started == 0


def test_a_lane_that_keeps_too_few_tries_whole_shards_again_when_what_failed_is_repaired(lane):
    with pytest.raises(InputError, match="min_kept_share"):
        lane.run(refusing(*lane.shards), floor=0.7)
    assert lane.run()["samples"] == 60


def test_what_is_known_to_be_too_little_starts_no_engine(lane):
    lane.run(refusing(lane.shards[1]), floor=0.8)
    lane.store.path(lane.shards[3]["id"]).unlink()
    with pytest.raises(InputError, match=r"12 of 60 .*Samples that were left out"):
        lane.run(floor=0.9)
    assert lane.engine.started == 0


def test_a_shard_that_goes_before_the_manifest_is_written_is_no_silent_loss(lane):
    lane.run()
    work = LaneWork(lane.store, lane.rows, lane.shards)
    lane.store.path(lane.shards[2]["id"]).unlink()
    with pytest.raises(InputError, match="no whole shard now"):
        describe_lane(work, {}, 0.0)


def test_a_sample_longer_than_the_engine_takes_is_left_out(tmp_path):
    samples = rows(20)
    samples[3].input_ids = list(range(1, 60)) * 2
    lane = Lane(tmp_path, samples)
    manifest = lane.run()
    assert manifest["quarantined"] == {"s3": "118 tokens; the engine takes 99"}
    assert manifest["samples"] == 19


def test_a_lane_that_keeps_too_few_fails_at_once_and_keeps_what_was_whole(lane):
    def late(n, key, states):
        return "no" if int(key[1:].split("-")[0]) >= 36 else states

    with pytest.raises(InputError, match="min_kept_share") as error:
        lane.run(late)
    assert "s3" in str(error.value)
    assert len(lane.read()) == 36
    assert len(lane.engine.asked) < 60 + 8
    assert lane.run()["samples"] == 60
    assert not any(key in ("s0", "s20") for key in lane.engine.asked)


def test_states_that_are_wrong_throughout_stop_the_lane_after_its_first_shard(lane):
    with pytest.raises(UnusableStates, match="aux_layer_ids"):
        lane.run(lambda n, key, s: s.roll(1, 1), limit=lane.two_shards)  # shifted by one layer
    assert lane.read() == {}
    assert len(lane.engine.asked) <= 36
    assert not any(key.endswith("-again") for key in lane.engine.asked)


@pytest.mark.parametrize("size", [1, 4, 12])
def test_a_last_state_that_is_often_right_is_found_in_small_shards_too(tmp_path, size):
    """As that of the layer before: in every other sample it leads to the second best token."""
    lane = Lane(tmp_path, rows(60), size)

    def near(n, key, states):
        if int(key.removesuffix("-again")[1:]) % 2:
            return states
        changed = states.clone()
        changed[-1, -1] = nearly(states[-1, -1])
        return changed

    with pytest.raises(UnusableStates, match="aux_layer_ids"):
        lane.run(near)
    assert lane.read() == {}
    assert lane.run()["samples"] == 60


def test_another_model_stops_the_lane(lane):
    other = torch.Generator().manual_seed(77)
    with pytest.raises(UnusableStates):
        lane.run(lambda n, key, s: torch.randn(s.shape, generator=other).to(torch.bfloat16))


def test_two_samples_swapped_are_found(lane):
    ids = [r.id for r in lane.rows.values() if len(r.input_ids) == 8][:2]

    def swap(n, key, states):
        return true_states(lane.rows[ids[1 - ids.index(key)]].input_ids) if key in ids else states

    lane.run(swap)
    assert right(lane)


def test_an_engine_that_dies_is_started_again_and_goes_on_without_the_sample(lane):
    def poison(n, key, states):
        if key.startswith("s17"):
            raise EngineDied("segmentation fault")
        return states

    manifest = lane.run(poison)
    assert lane.engine.started == 3
    assert list(manifest["quarantined"]) == ["s17"]
    assert "segmentation fault" in manifest["quarantined"]["s17"]
    assert len(lane.read()) == 59
    assert right(lane)


def test_an_engine_that_always_dies_fails_the_lane(lane):
    def dies(n, key, states):
        raise EngineDied("no memory")

    with pytest.raises(EngineDied, match="3 engines died"):
        lane.run(dies, floor=0.0)


def test_staging_stays_within_its_bound(lane):
    most = 0

    def watch(n, key, states):
        nonlocal most
        size = 0
        for path in list(lane.folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # a writer reads and removes them
                size += path.stat().st_size - 400
        most = max(most, size)
        return states

    assert lane.run(watch, limit=lane.two_shards)["samples"] == 60
    assert 0 < most <= lane.two_shards


def test_the_engine_never_computes_samples_of_two_shards_together(lane):
    """In bf16 a state's last bits depend on the batch: a killed lane would write other shards."""
    shard_of = {i: shard["id"] for shard in lane.shards for i in shard["samples"]}
    batches = []

    def watch(n, key, states):
        batches.append({shard_of[key], *(shard_of[r.key] for r in lane.engine.flying)})
        return states

    lane.run(watch)
    assert len(batches) == 60
    assert all(len(batch) == 1 for batch in batches)


def test_a_killed_run_and_its_continuation_write_what_an_undisturbed_one_does(tmp_path, lane):
    lane.run()
    whole = lane.bytes()
    (tmp_path / "b").mkdir()
    other = Lane(tmp_path / "b", rows(60))

    def killed(n, key, states):
        if n > 40:
            raise KeyboardInterrupt
        return states

    with pytest.raises(KeyboardInterrupt):
        other.run(killed)
    assert 0 < len(other.read()) < 60
    (next(iter(other.store.folder.glob("*.json")))).unlink()  # a kill between the two files
    other.run()
    assert other.bytes() == whole


@pytest.mark.parametrize(
    "damage", ["cut", "foreign", "other verifier", "other samples", "folder", "link to nothing"]
)
def test_a_damaged_or_foreign_shard_is_moved_aside_and_made_again(lane, damage):
    lane.run()
    whole = lane.bytes()
    path = lane.store.path(lane.shards[1]["id"])
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "foreign":
        path.write_bytes(b"not a shard")
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "link to nothing":
        path.unlink()
        path.symlink_to("nothing")
    elif damage == "other samples":
        path.write_bytes(lane.store.path(lane.shards[0]["id"]).read_bytes())
    else:
        data = path.read_bytes()
        path.write_bytes(data.replace(b"f" * 32, b"e" * 32))
    manifest = lane.run()
    assert manifest["extracted_samples"] == 12
    assert lane.bytes() == whole
    assert len(list((lane.store.folder / "damaged").iterdir())) == 1


def test_a_flipped_bit_is_found_when_a_sample_is_copied(tmp_path, lane):
    lane.run()
    path = lane.store.path(lane.shards[0]["id"])
    data = bytearray(path.read_bytes())
    data[-20] ^= 4
    path.write_bytes(data)
    # The same samples in other shards: all copied but those of the damaged one.
    edited = Lane(tmp_path, rows(60)[1:])
    manifest = edited.run(floor=1.0)
    assert manifest["samples"] == 59
    assert 1 <= manifest["extracted_samples"] <= 12
    assert right(edited)


def test_a_shard_that_another_run_moved_aside_first_is_no_fault(lane):
    lane.run()
    path = lane.store.path(lane.shards[1]["id"])
    assert lane.store.set_aside(path) == lane.store.folder / "damaged" / path.name
    assert lane.store.set_aside(path) is None


@pytest.mark.parametrize("kinds", itertools.product(["file", "folder"], repeat=2), ids="-".join)
def test_what_is_set_aside_twice_replaces_what_was_before(lane, kinds):
    path = lane.store.path(lane.shards[1]["id"])
    path.parent.mkdir(parents=True)
    for kind in kinds:
        if kind == "folder":
            path.mkdir()
            (path / "x").write_text("x")
        else:
            path.write_text("no shard")
        lane.run()
        path.unlink()
    assert (lane.store.folder / "damaged" / path.name).is_dir() == (kinds[1] == "folder")


def test_a_shard_that_cannot_be_read_now_is_left_where_it_is(lane, monkeypatch):
    lane.run()
    path = lane.store.path(lane.shards[1]["id"])
    real = Path.open

    def refuse(self, *arguments, **more):
        if self == path:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return real(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match="Too many open files"):
        lane.run()
    assert path.is_file()
    assert lane.engine.started == 0


def test_a_kill_between_a_shard_and_its_facts_forgets_nothing(lane, monkeypatch):
    def refuse(n, key, states):
        return "no" if key.startswith("s17") else states

    def killed(path, left_out):
        if left_out:
            raise KeyboardInterrupt
        return real(path, left_out)

    real = states_store.write_facts
    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(states_store, "write_facts", killed)
        lane.run(refuse)
    # Other shards may or may not have been begun when the writer died.
    assert lane.read().keys() >= {i for i in lane.shards[1]["samples"] if i != "s17"}
    manifest = lane.run(refuse)
    assert "s17" not in lane.engine.asked
    assert manifest["quarantined"] == {"s17": "no"}
    assert manifest["samples"] == 59


def test_a_writer_killed_before_any_step_leaves_a_whole_shard_or_none(lane):
    samples = [Sample(i, torch.tensor(r.input_ids), true_states(r.input_ids))
               for i, r in list(lane.rows.items())[1:12]]  # fmt: skip
    shard, left_out = lane.shards[0], {lane.store.key(lane.rows["s0"].input_ids, []): "no"}
    path = lane.store.path(shard["id"])
    states_store.write_shard(lane.store, shard["id"], samples, left_out)
    whole = lane.bytes()
    steps = {"open", "tempfile.mkstemp", "os.rename", "os.remove", "os.chmod", "os.mkdir", "fsync"}
    for number in itertools.count(1):
        shutil.rmtree(lane.store.folder)
        if (child := os.fork()) == 0:
            left = [number]

            def step(event, arguments, left=left):
                if event in steps and str(lane.store.folder) in str(arguments[0]):
                    left[0] -= 1
                    if not left[0]:
                        os.kill(os.getpid(), signal.SIGKILL)

            def sync(file, real=os.fsync, step=step):
                step("fsync", [os.readlink(f"/proc/self/fd/{file}")])
                real(file)

            os.fsync = sync
            sys.addaudithook(step)
            states_store.write_shard(lane.store, shard["id"], samples, left_out)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        there = path.exists()
        work = LaneWork(lane.store, lane.rows, [shard])
        assert work.missing == ([] if there else [shard])
        assert work.left_out == ({"s0": "no"} if there else {})
        if not there:
            states_store.write_shard(lane.store, shard["id"], samples, left_out)
        # Temporary files are left, which `store.py gc` collects.
        assert {n: b for n, b in lane.bytes().items() if n[0] != "."} == whole
        if status == 0:
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert number > 15  # steps there are


def test_facts_of_an_earlier_shard_of_the_name_are_not_taken_for_those_of_this_one(
    lane, monkeypatch
):
    manifest = lane.run()
    path = lane.store.path(lane.shards[1]["id"])
    facts = json.loads(shard_facts.facts_path(path).read_text())
    # Of the same size, of other states, as another engine may have made them.
    shard_facts.facts_path(path).write_text(json.dumps({**facts, "checksum": "0" * 16}))
    path.unlink()
    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(
            states_store, "write_facts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        lane.run()
    assert path.is_file()
    assert lane.run()["shards"] == manifest["shards"]


def test_samples_are_copied_by_what_they_are_not_by_where_they_lay(tmp_path, lane):
    """Another run makes the shard anew after this one looked, with the samples elsewhere in it."""
    lane.run()
    edited = Lane(tmp_path, rows(60)[1:])
    name, find = lane.shards[0]["id"], edited.store.find_samples

    def then_changed(keys):
        found = find(keys)
        with Shard(lane.store.path(name)) as shard:
            samples = [shard.read(number) for number in range(12)]
        lane.store.write(name, samples[::-1])
        return found

    edited.store.find_samples = then_changed
    assert edited.run(floor=1.0)["samples"] == 59
    assert right(edited)
    assert lane.store.has(name)


def test_a_list_of_shards_that_does_not_fit_the_samples_is_said_to_be_so(lane):
    del lane.rows["s7"]
    with pytest.raises(InputError, match=r"1 samples of .*\(s7\); delete both"):
        lane.run()


def test_what_a_manifest_names_is_missed_when_it_is_gone_or_cut(tmp_path, lane):
    manifest = tmp_path / "lane-0.json"
    assert broken_shards(manifest, tmp_path / "store") == []
    manifest.write_text(json.dumps(lane.run()))
    assert broken_shards(manifest, tmp_path / "store") == []
    # What comes and goes beside the shards while another run writes is none of them.
    (lane.store.folder / ".x.1.abc.tmp").symlink_to("gone")
    assert broken_shards(manifest, tmp_path / "store") == []
    first, second, *_ = (lane.store.path(s["id"]) for s in lane.shards)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    assert set(broken_shards(manifest, tmp_path / "store")) == {first.name, second.name}
    for text in ("{", "[]", '{"shards": [1]}', '{"shards": [{"file": "a", "bytes": 1}]}'):
        manifest.write_text(text)
        assert broken_shards(manifest, tmp_path / "store") == ["lane-0.json"]


def test_too_little_room_is_said_with_figures_before_anything_starts(lane, monkeypatch):
    with pytest.raises(InputError, match=r"max_gib = 0\.001"):
        check_room(lane.store, 1_000_000, 0.001)
    with pytest.raises(InputError, match=r"1,000,000,000,000 tokens take .* GiB are free"):
        check_room(lane.store, 10**12, None)
    check_room(lane.store, 0, 0.000001)
    check_room(lane.store, 1000, 1)


def test_room_is_reckoned_with_the_ratio_that_was_measured(lane):
    assert measured_ratio(lane.store) == 1.0
    manifest = lane.run()
    ratio = measured_ratio(lane.store)
    assert ratio == pytest.approx(min(1.0, 1.05 * manifest["bytes"] / manifest["raw_bytes"]))


FULL = """
import resource, signal, sys
sys.path[:0] = [{scripts!r}, {tests!r}]
from pathlib import Path
from support.lanes import Lane, rows
from aerie.common import cli

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lane = Lane(Path({root!r}), rows(60))

def squeeze(n, key, states):
    if n > 40:  # from now on no file may grow beyond this: as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    return states

cli.run(lambda: lane.run(squeeze, limit=lane.two_shards))
"""


def test_a_full_disk_is_a_clean_stop_and_the_next_run_goes_on(tmp_path, lane):
    code = FULL.format(scripts=str(SCRIPTS), tests=str(ROOT / "tests"), root=str(tmp_path / "full"))
    (tmp_path / "full").mkdir()
    paths = [str(SCRIPTS), str(ROOT / "tests"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(paths), "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the disk is full" in done.stderr
    other = Lane(tmp_path / "full", rows(60))
    kept = len(other.read())
    assert 0 < kept < 60
    assert not [p for p in other.store.folder.iterdir() if p.name.startswith(".")]
    assert other.run()["samples"] == 60
    assert len(other.engine.asked) == 60 - kept


def test_staging_of_a_killed_process_is_removed_by_the_next(tmp_path, monkeypatch):
    # Not where other processes of this machine stage, and remove what is abandoned.
    monkeypatch.setattr(staging, "MEMORY", tmp_path)
    monkeypatch.setattr(staging.tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal, sys\n"
        "from aerie.engine import staging\n"
        f"staging.MEMORY = staging.Path({str(tmp_path)!r})\n"
        f"staging.tempfile.tempdir = {str(tmp_path)!r}\n"
        "s = staging.Staging()\n"
        "(s.folder / 'x').write_bytes(b'1' * 1000)\n"
        "print(s.folder, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == 'die' else sys.stdin.read()\n"
    )
    environment = {"PYTHONPATH": str(SCRIPTS), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", code]
    dead = subprocess.run([*command, "die"], env=environment, capture_output=True, text=True)
    left = Path(dead.stdout.strip())
    assert (left / "x").exists()
    alive = subprocess.Popen(
        [*command, "live"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    other = Path(alive.stdout.readline().strip())
    with staging.Staging() as mine:
        assert mine.folder.is_dir()
        assert not left.exists()
        assert (other / "x").exists()
    assert not mine.folder.exists()
    alive.communicate("")


def test_staging_works_without_locks_and_removes_nothing_then(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with staging.Staging() as other:
        monkeypatch.setattr(staging.fcntl, "flock", refuse)
        with staging.Staging() as mine:
            assert mine.folder.is_dir()
            assert other.folder.is_dir()
        assert not mine.folder.exists()


def test_staging_lies_on_disk_where_memory_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_memory_for", lambda limit: False)
    monkeypatch.setattr(staging.tempfile, "tempdir", str(tmp_path))
    with staging.Staging() as found:
        assert found.folder.parent == tmp_path
    with pytest.raises(InputError, match="GiB are free"):
        staging.Staging(1 << 60)


# Two runs on one store


def waiting_lane(lane, monkeypatch, name="other"):
    """A second lane with the same shards and a staging folder of its own."""
    monkeypatch.setattr(extraction, "POLL_SECONDS", 0.05)
    return Lane(lane.folder.parent, list(lane.rows.values()), folder=name)


def at_once(both):
    """Gives an engine's first states when the other lane has an engine, too, and all slowly."""
    begun = []

    def slowly(n, key, states):
        if not begun:
            begun.append(key)
            both.wait(timeout=120)
        time.sleep(0.02)
        return states

    return slowly


def test_two_lanes_of_one_store_share_the_work_and_make_nothing_twice(lane, monkeypatch):
    other, both = waiting_lane(lane, monkeypatch), threading.Barrier(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(x.run, at_once(both)) for x in (lane, other)]
        one, two = (x.result() for x in runs)
    assert sorted(lane.engine.asked + other.engine.asked) == sorted(lane.rows)
    assert one["shards"] == two["shards"]
    assert one["samples"] == len(lane.rows)
    assert one["extracted_samples"] + one["adopted_samples"] == len(lane.rows)
    assert two["adopted_samples"] == one["extracted_samples"] > 0
    assert not list(lane.store.folder.glob(".*"))


def test_a_lane_waits_for_what_another_makes_and_starts_no_engine_for_it(lane, monkeypatch, capsys):
    other = waiting_lane(lane, monkeypatch)
    whole = lane.run()
    for shard in lane.shards[1:]:
        lane.store.path(shard["id"]).rename(lane.store.path(shard["id"]).with_suffix(".later"))
    phases = []

    def make_the_rest():
        while "waiting" not in phases:
            time.sleep(0.01)
        for shard in lane.shards[1:]:
            path = lane.store.path(shard["id"])
            path.with_suffix(".later").rename(path)
            holder.release(path)

    with Leases() as holder, concurrent.futures.ThreadPoolExecutor(1) as pool:
        for shard in lane.shards[1:]:
            assert holder.take(lane.store.path(shard["id"]))
        pool.submit(make_the_rest)
        done = other.run(enter=phases.append)
    assert other.engine.started == 0
    assert done["shards"] == whole["shards"]
    assert f"process {os.getpid()} on " in capsys.readouterr().out


def test_two_lanes_that_each_can_keep_nothing_of_a_shard_do_not_wait_for_each_other(
    lane, monkeypatch
):
    """Each holds its lease until its own work is done, and the other waits for it then."""
    other = waiting_lane(lane, monkeypatch)
    refuse = refusing(*lane.shards[::2])

    def slow_refuse(n, key, states):
        time.sleep(0.01)
        return refuse(n, key, states)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(x.run, slow_refuse, floor=0.1) for x in (lane, other)]
        one, two = (x.result(timeout=60) for x in running)
    assert (
        one["quarantined"]
        == two["quarantined"]
        == dict.fromkeys((i for s in lane.shards[::2] for i in s["samples"]), "no")
    )
    asked = [key for key in lane.engine.asked + other.engine.asked if not key.endswith("-again")]
    assert sorted(asked) == sorted(lane.rows)
    assert one["samples"] == two["samples"] == 24
    assert one["extracted_samples"] + one["adopted_samples"] == 24


def test_shards_of_a_lane_that_vanished_are_taken_over(lane, monkeypatch):
    monkeypatch.setattr("aerie.common.leases.EXPIRY_SECONDS", 0.3)
    other = waiting_lane(lane, monkeypatch)
    lane.store.folder.mkdir(parents=True)
    for shard in lane.shards:
        lease = lease_path(lane.store.path(shard["id"]))
        lease.write_text('{"machine": "another", "process": 1, "token": "x"}')
    done = other.run()
    assert done["extracted_samples"] == len(lane.rows)
    assert not list(lane.store.folder.glob(".*"))
