"""Fixtures and settings of all tests, and how they are divided among processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from support.models import make_verifier
from support.project import Project

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# The check before a run would cost each test its imports.
os.environ.setdefault("AERIE_UNCHECKED", "1")
# A shell that starts the tests in the background ignores SIGINT, and jobs would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


ORDER = ["engine", "slurm", "workflow", "unit"]
"""Folders of the tests, those that take longest first."""
CORES = sorted(os.sched_getaffinity(0))


def kind(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(kind(item)))


class Scheduler(LoadScopeScheduling):
    """Decides which tests stay together when several processes run them.

    Tests that start an engine run one after the other, because two engines would compete for cores
    and memory. Those on Slurm mostly wait. All others stay with their module, so that its fixtures
    are made once. (The marker `xdist_group` has no effect with pytest 9.2 and pytest-xdist 3.8.)
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::")[0]
        folder = module.split("/")[1]
        return folder if folder in ("engine", "slurm") else module


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduler:
    return Scheduler(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each of several test processes cores of its own, and so its children.

    An engine whose threads share a core with another test waits for them at every step. Slurm
    needs all cores, since it counts them.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    own = CORES[number::count] if kind(item) != "slurm" else CORES
    os.sched_setaffinity(0, own or CORES)


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory) -> Path:
    return make_verifier(tmp_path_factory.mktemp("verifier") / "tiny-llama")


@pytest.fixture
def project(tmp_path) -> Iterator[Project]:
    made = Project(tmp_path / "project")
    yield made
    made.close()
