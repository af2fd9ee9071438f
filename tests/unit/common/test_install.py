"""Setting up .venv, with a lock of one package and indexes that are folders here."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="envs/cpu.lock is for 3.11")

VERSION = "9.9.9+cpu"


@pytest.fixture
def install(tmp_path):
    """A copy of envs/install.sh whose lock asks for a torch that no index of pip's has."""
    (tmp_path / "envs").mkdir()
    shutil.copy2(ROOT / "envs/install.sh", tmp_path / "envs")
    (tmp_path / "envs/cpu.lock").write_text(f"torch=={VERSION}\n")
    (tmp_path / "empty").mkdir()
    place = tmp_path / "index/torch"
    place.mkdir(parents=True)
    info = f"torch-{VERSION}.dist-info"
    name = f"torch-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(place / name, "w") as wheel:
        wheel.writestr("torch/__init__.py", f"__version__ = {VERSION!r}\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {VERSION}\n"
        )
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    (place / "index.html").write_text(f'<a href="{name.replace("+", "%2B")}">{name}</a>')

    def run(**variables: str) -> subprocess.CompletedProcess:
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "AERIE_"))}
        return subprocess.run(
            [tmp_path / "envs/install.sh", "cpu"],
            env={
                **keep,
                "PYTHON": str(Path(sys.base_prefix) / "bin/python3.11"),
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_INDEX_URL": (tmp_path / "empty").as_uri(),
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def test_torch_comes_from_the_index_that_is_given(install, tmp_path):
    done = install()
    assert done.returncode == 1
    assert f"pip finds no torch=={VERSION} in its configured indexes; give one" in done.stderr
    assert "AERIE_TORCH_INDEX=https://" in done.stderr
    done = install(AERIE_TORCH_INDEX=(tmp_path / "index").as_uri())
    assert done.returncode == 0, done.stdout + done.stderr
    command = [tmp_path / ".venv/bin/python", "-c", "import torch; print(torch.__version__)"]
    assert subprocess.check_output(command, text=True).strip() == VERSION
