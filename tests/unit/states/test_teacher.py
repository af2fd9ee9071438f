"""The teacher accepts the states of a real model and refuses others."""

import pytest
import torch

from aerie.common.errors import UnusableStates
from aerie.states.teacher import Teacher


def last_states(verifier, ids):
    """The last layer's output of transformers, bf16 [samples, T, 128], and its best next tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32)
    found = []
    model.model.layers[-1].register_forward_hook(lambda *a: found.append(a[2]))
    with torch.no_grad():
        chosen = model(ids).logits.argmax(-1)
    last = found[0] if isinstance(found[0], torch.Tensor) else found[0][0]
    return last.to(torch.bfloat16), chosen


@pytest.fixture(params=["the processor's own", "float32"])
def arithmetic(request, monkeypatch):
    """The head's number format: this processor's, and that of a processor without bf16."""
    if request.param == "float32":
        monkeypatch.setattr("aerie.states.teacher.processor_computes_bf16", lambda: False)


@pytest.mark.usefixtures("arithmetic")
def test_teacher_refuses_a_long_sample_that_is_shifted_in_part(tiny_verifier):
    ids = torch.randint(3, 400, (1, 300), generator=torch.Generator().manual_seed(0))
    last, chosen = last_states(tiny_verifier, ids)
    states, chosen = last[0][:, None], chosen[0].tolist()
    teacher = Teacher(tiny_verifier)
    teacher.check(states, chosen, greedy=True)
    shifted = torch.cat([states[:150].roll(1, 0), states[150:]])
    with pytest.raises(UnusableStates, match="does not lead to"):
        teacher.check(shifted, chosen, greedy=True)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("kind", ["zeros", "huge", "nan", "infinity"])
def test_teacher_refuses_states_that_prefer_no_token(tiny_verifier, kind):
    """All logits are equal then, so no token ranks before the chosen one."""
    teacher = Teacher(tiny_verifier)
    last, chosen = last_states(tiny_verifier, torch.arange(3, 23)[None])
    factor = {"zeros": 0.0, "huge": 1e30, "nan": float("nan"), "infinity": float("inf")}[kind]
    with pytest.raises(UnusableStates, match="does not lead"):
        teacher.check(last[0][:, None] * factor, chosen[0].tolist(), greedy=True)


@pytest.mark.usefixtures("arithmetic")
def test_teacher_refuses_two_samples_that_changed_places(tiny_verifier):
    ids = torch.randint(3, 400, (64, 12), generator=torch.Generator().manual_seed(0))
    last, chosen = last_states(tiny_verifier, ids)
    states, chosen = last[:, -1:].expand(-1, 3, -1).clone(), chosen[:, -1].tolist()
    teacher = Teacher(tiny_verifier)
    teacher.check(states, chosen, greedy=True)
    states[[10, 40]] = states[[40, 10]]
    with pytest.raises(UnusableStates, match="does not lead to"):
        teacher.check(states, chosen, greedy=True)
