"""Fixtures of the tests of supervisor and status."""

import pytest

from support.processes import end_marked
from support.run_folder import RunFolder
from support.supervised import Supervised


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "results" / "demo")


@pytest.fixture
def supervised(tmp_path):
    started = []

    def start(*arguments, **options):
        started.append(Supervised(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for job in started:
        end_marked(job.mark)
