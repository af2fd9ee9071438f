"""Files that are whole or absent."""

import os

import pytest

from aerie.common.files import atomic_write, write_bytes


def test_a_file_is_synced_before_it_has_its_name_and_its_folder_after(tmp_path, monkeypatch):
    calls = []
    sync, replace = os.fsync, os.replace

    def synced(file):
        calls.append(("synced", os.fstat(file).st_ino))
        sync(file)

    def named(source, target):
        calls.append(("named", os.stat(source).st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    write_bytes(tmp_path / "x", b"new")
    file, folder = (tmp_path / "x").stat().st_ino, tmp_path.stat().st_ino
    assert calls == [("synced", file), ("named", file), ("synced", folder)]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, failure):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises((KeyboardInterrupt, OSError)), atomic_write(path) as temporary:
        temporary.write_bytes(b"half of the n")
        assert path.read_bytes() == b"old"
        raise failure
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"old")]
