"""Fixtures of the store's maintenance."""

from types import SimpleNamespace

import pytest

from support.finished_run import FinishedRun, make_head


@pytest.fixture(scope="session")
def verifier(tmp_path_factory) -> SimpleNamespace:
    return make_head(tmp_path_factory.mktemp("store") / "verifier")


@pytest.fixture
def finished(tmp_path, verifier, capsys, monkeypatch) -> FinishedRun:
    return FinishedRun(tmp_path, verifier, capsys, monkeypatch)
