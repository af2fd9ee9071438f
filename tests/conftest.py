"""Fixtures and settings of all tests."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.models import make_verifier
from support.project import Project

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# The check at the start of a run would cost each test its imports.
os.environ.setdefault("AERIE_UNCHECKED", "1")
# A shell that starts the tests in the background has SIGINT ignored, and jobs would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def kind(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests stay together when several processes run them (`--dist loadgroup`).

    Those that start an engine run one after the other, or they would wait for each other's cores
    and memory; they take longest, so they are handed out first. The others stay with their module,
    whose fixtures are then made once.
    """
    order = ["engine", "slurm", "workflow", "unit"]
    items.sort(key=lambda item: order.index(kind(item)))
    for item in items:
        group = "engine" if kind(item) in ("engine", "slurm") else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory) -> Path:
    return make_verifier(tmp_path_factory.mktemp("verifier") / "tiny-llama")


@pytest.fixture
def project(tmp_path) -> Iterator[Project]:
    made = Project(tmp_path / "project")
    yield made
    made.close()
