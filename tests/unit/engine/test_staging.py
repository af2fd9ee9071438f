"""Staging folders: where they are, and when they are removed."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from aerie.common.errors import InputError
from aerie.engine import staging
from support.paths import SCRIPTS


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path, monkeypatch):
    # Away from where other processes on this machine stage and clean up.
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


def test_without_file_locks_nothing_is_removed(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with staging.Staging() as other:
        monkeypatch.setattr(staging.fcntl, "flock", refuse)
        with staging.Staging() as mine:
            assert mine.folder.is_dir()
            assert other.folder.is_dir()
        assert not mine.folder.exists()


def test_states_are_staged_on_disk_if_memory_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_memory_for", lambda limit: False)
    monkeypatch.setattr(staging.tempfile, "tempdir", str(tmp_path))
    with staging.Staging() as found:
        assert found.folder.parent == tmp_path
    with pytest.raises(InputError, match="GiB are free"):
        staging.Staging(1 << 60)
