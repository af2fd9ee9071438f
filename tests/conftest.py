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


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory) -> Path:
    return make_verifier(tmp_path_factory.mktemp("verifier") / "tiny-llama")


@pytest.fixture
def project(tmp_path) -> Iterator[Project]:
    made = Project(tmp_path / "project")
    yield made
    made.close()
