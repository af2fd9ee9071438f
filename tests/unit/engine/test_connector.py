"""The files that the connector writes, without an engine."""

import pytest
import torch

from aerie.engine.captured import read_captured


@pytest.fixture(scope="module")
def connector():
    from aerie.engine import connector

    return connector


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_states_are_saved_in_bf16_whatever_the_verifier_computes_in(tmp_path, connector, dtype):
    states, tokens = torch.randn(4, 3, 16).to(dtype), torch.arange(4)
    path = tmp_path / "x.safetensors"
    tensors = {"hidden_states": states, "token_ids": tokens}
    connector.HiddenStatesConnector._write_tensors(tensors, connector._Done(), str(path), None)
    assert list(tmp_path.iterdir()) == [path]
    saved, found = read_captured(path)
    assert torch.equal(saved, states.bfloat16())
    assert torch.equal(found, tokens)


def test_states_that_cannot_be_saved_leave_a_reason_and_no_partial_file(tmp_path, connector):
    class Lost(connector._Done):
        def synchronize(self):
            raise RuntimeError("the copy failed")

    path = tmp_path / "x.safetensors"
    with pytest.raises(RuntimeError):
        connector.HiddenStatesConnector._write_tensors({}, Lost(), str(path), None)
    assert not path.exists()
    assert (tmp_path / "x.safetensors.error").read_text() == "RuntimeError: the copy failed"
