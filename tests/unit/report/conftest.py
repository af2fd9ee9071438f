"""Runs to report on."""

import pytest

from support.reports import FakeRun


@pytest.fixture
def fake(tmp_path):
    def make(**config):
        config.setdefault("drafters", {"base": {"vocabulary": 4000, "epochs": 3}})
        return FakeRun(tmp_path, **config)

    return make
