"""The verifier's tokenizer and chat template."""

from itertools import groupby
from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.planning.preflight.result import CheckResult


def check_template(folder: Path, text: Any, trusted: bool) -> list[CheckResult]:
    """Whether the tokenizer fits the model, and a conversation shows what is supervised."""
    from aerie.chat.template import ChatTemplate
    from aerie.chat.unverified import Unverified

    try:
        chat = ChatTemplate.load(folder, trusted)
    except InputError as error:
        return [CheckResult("chat template", "error", str(error), "no prompt can be rendered")]
    results = []
    size = len(chat.tokenizer)
    if size < text.vocab_size:
        results.append(
            CheckResult(
                "vocabulary",
                "ok",
                f"padded: {text.vocab_size:,} rows for {size:,} tokens",
                "maps cover the rows; the padding is never drafted",
            )
        )
    elif size > text.vocab_size:
        results.append(
            CheckResult(
                "vocabulary",
                "warning",
                f"the tokenizer has {size:,} tokens, the model {text.vocab_size:,} rows",
                "a token beyond the rows stops the engine",
                "check that tokenizer and weights belong together",
            )
        )
    messages = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "It is 4."},
    ]
    try:
        masked = chat.mask(messages)
    except Unverified as error:
        results.append(
            CheckResult(
                "chat template",
                "error",
                error.reason,
                "the assistant's words cannot be told from the rest",
                "make inspect shows more; docs/loss_masks.md says what a template must do",
            )
        )
        return results
    parts, at = [], 0
    for supervised, run in groupby(masked.loss_mask):
        end = at + len(list(run))
        piece = chat.text_of(masked.input_ids, at, end)
        parts.append(f"⟦{piece}⟧" if supervised else piece)
        at = end
    results.append(
        CheckResult("chat template", "ok", "".join(parts), "⟦ ⟧ mark what is supervised")
    )
    return results
