"""States and tokens of the real engine against transformers in float32."""

import json

import pytest

from support.models import TINY_ENGINE
from support.processes import run_python

pytestmark = pytest.mark.engine

EXTRACT = """
import json, sys
from pathlib import Path

if __name__ == "__main__":
    import torch
    from transformers import AutoModelForCausalLM
    from aerie import config
    from aerie.engine.captured import read_captured
    from aerie.engine.in_process import InProcessEngine
    from aerie.engine.protocol import Request
    from aerie.common.errors import UnusableStates
    from aerie.states.checks import check_states
    from aerie.states.convention import Convention
    from aerie.states.teacher import Teacher
    from aerie.engine.staging import Staging

    model, settings = Path({model!r}), config.Engine(**{settings!r})
    ids = [0, 1, 3, 6]
    torch.manual_seed(1)
    prompts = [torch.randint(3, 400, (n,)).tolist() for n in (3, 7, 20, 33, 64, 90, 120, 11)]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    convention = Convention("f" * 32, tuple(ids), 128)
    teacher = Teacher(model)
    found = {{}}
    with (
        Staging() as staging,
        InProcessEngine(
            model, settings, max_model_len=160, capture_ids=ids, staging=staging.folder
        ) as engine,
    ):

        def states(prompts, max_tokens=1):
            requests = [Request(str(i), p, max_tokens) for i, p in enumerate(prompts)]
            got = {{}}
            for answer in engine.run(iter(requests)):
                s, tokens = read_captured(answer.states)
                assert tokens.tolist() == (answer.prompt + answer.tokens)[:-1]
                check_states(s, tokens, convention)
                got[int(answer.key)] = (s, tokens, answer.tokens)
            return [got[i] for i in range(len(prompts))]

        together = states(prompts)
        alone = [states([p])[0] for p in prompts]
        answers = states(prompts, max_tokens=24)
    worst = 0.0
    for (s, tokens, _), (t, _, _), (a, with_answer, chosen) in zip(together, alone, answers):
        # The same alone and together, so states are not swapped between samples.
        assert torch.allclose(s.float(), t.float(), atol=0.05, rtol=0.05)
        # The captured prompt of one pass is the extracted prompt of two.
        assert torch.allclose(a[: len(s)].float(), s.float(), atol=0.05, rtol=0.05)
        for got, ids_of_it in ((s, tokens), (a, with_answer)):
            out = reference(ids_of_it[None], output_hidden_states=True)
            hidden = list(out.hidden_states)
            # transformers normalises the last one; layer 5 gives the state before that.
            keep = {{}}
            hook = reference.model.norm.register_forward_pre_hook(
                lambda _, x: keep.update(last=x[0])
            )
            reference(ids_of_it[None])
            hook.remove()
            right = torch.stack([hidden[0], hidden[1], hidden[3], keep["last"]], 2)[0]
            error = (got.float() - right).norm(dim=-1) / right.norm(dim=-1)
            worst = max(worst, error.max().item())
        # Greedy tokens are transformers'.
        logits = reference(with_answer[None]).logits[0]
        agree = logits[len(s) - 1 :].argmax(-1).tolist()
        found.setdefault("agree", []).append(
            sum(x == y for x, y in zip(agree, chosen)) / len(chosen)
        )
        teacher.check(a, chosen, greedy=True)
        # Layers and positions shifted by one are detected.
        for wrong in (a[:, [1, 2, 3, 2]], torch.roll(a, 1, 0)):
            try:
                teacher.check(wrong, chosen, greedy=True)
            except UnusableStates:
                found["refused"] = found.get("refused", 0) + 1
    found["worst"] = worst
    print("FOUND", json.dumps(found))
"""


def test_the_engines_states_match_transformers(tiny_verifier):
    # In bf16 the tiny verifier's random layers would add their rounding up to a tenth.
    settings = {**TINY_ENGINE, "dtype": "float32"}
    output = run_python(EXTRACT.format(model=str(tiny_verifier), settings=settings))
    found = json.loads(output.split("FOUND", 1)[1])
    assert found["worst"] < 0.01  # states are kept in bf16, 8 bits
    assert sum(found["agree"]) / len(found["agree"]) > 0.9
    assert found["refused"] >= 14  # of 16
