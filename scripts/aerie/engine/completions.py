"""Token ids in requests to completion servers and in their answers.

A server that cannot return token ids gives text, which is tokenised again in its context and
checked. An answer whose tokens are not certain is refused with a reason.
"""

from typing import Any

from aerie.chat.template import ChatTemplate
from aerie.chat.unverified import Unverified
from aerie.common.errors import InputError
from aerie.engine.protocol import Answer, Request
from aerie.engine.responses import RequestFailed
from aerie.engine.servers import PromptForm

BEYOND_OPENAI = {
    "return_token_ids": True,
    "skip_special_tokens": False,
    # Unless these are given, a server takes them from the checkpoint's generation_config.json;
    # the job's own engine does not.
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Fields of vLLM and SGLang."""

OTHER_COUNT = "re-tokenised answer has another number of tokens than were generated"


class TokenCodec:
    """Converts between token ids and what a server takes and gives, for one chat template.

    `template`: the verifier's; the servers must use the same tokenizer.
    """

    def __init__(self, template: ChatTemplate):
        self.template = template
        self._turn_end = _end_of_turn(template)
        self._eos_texts = {i: self.decode([i]) for i in sorted(template.eos_ids)}

    def payload(self, request: Request, form: PromptForm) -> dict[str, Any]:
        """The fields of a request's body that depend on the form.

        Raises `Unverified` if the prompt cannot be sent in this form.
        """
        prompt = request.prompt if form == PromptForm.IDS else self.as_text(request.prompt)
        extra: dict[str, Any] = {} if form == PromptForm.PLAIN else {**BEYOND_OPENAI}
        if request.end_ids:
            extra["stop_token_ids"] = list(request.end_ids)
        return {**extra, "prompt": prompt}

    def read(self, request: Request, given: dict[str, Any], form: PromptForm) -> Answer:
        """The answer in a response.

        Raises `RequestFailed` if it contains none, `Unverified` if its tokens are not certain.
        """
        try:
            choice, usage = given["choices"][0], given.get("usage") or {}
            finish, tokens = choice.get("finish_reason"), choice.get("token_ids")
            seen = choice.get("prompt_token_ids") or given.get("prompt_token_ids")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise RequestFailed("the response contains no answer") from None
        if finish in (None, "abort", "error"):
            raise RequestFailed(f"the answer was cut off (finish reason {finish})")
        if finish not in ("stop", "length"):
            raise Unverified(f"the endpoint ended the answer: {finish}")
        size = usage.get("prompt_tokens") if form != PromptForm.IDS else None
        if seen not in (None, request.prompt) or size not in (None, 0, len(request.prompt)):
            raise Unverified("the endpoint read the prompt as other tokens")
        if tokens is None:
            tokens = self._tokenise(request, choice, usage.get("completion_tokens") or None)
        elif not tokens or not all(isinstance(i, int) for i in tokens):
            raise RequestFailed("the response contains an empty answer")
        elif finish == "stop" and tokens[-1] not in {*self._eos_texts, choice.get("stop_reason")}:
            tokens = [*tokens, self._ended_by(choice)]
        return Answer(request.key, request.prompt, list(tokens), finish, None)

    def _tokenise(self, request: Request, choice: dict[str, Any], count: int | None) -> list[int]:
        """Ids of an answer given as text, of which `count` were generated (None: unknown)."""
        text, stopped = choice.get("text"), choice["finish_reason"] == "stop"
        if not isinstance(text, str) or not (text or (stopped and count)):
            raise RequestFailed("the response contains an empty answer")
        if stopped:
            ending = next((t for t in self._eos_texts.values() if t and text.endswith(t)), "")
            text = text.removesuffix(ending)
        if "\ufffd" in text:
            raise Unverified("answer contains bytes that are not text")
        before = self.decode(request.prompt)
        whole = self.encode(before + text)
        head = len(request.prompt)
        same = whole[:head] == request.prompt
        tokens = whole[head:] if same else self.encode(text)
        if self.decode([*request.prompt, *tokens]) != before + text:
            raise Unverified("answer reads differently when re-tokenised")
        if stopped:
            tokens = [*tokens, self._ended_by(choice)]
        # Whether the token that ended the turn is counted depends on the server.
        if count is not None and count not in {len(tokens), len(tokens) - stopped}:
            raise Unverified(OTHER_COUNT)
        if len(tokens) > request.max_tokens + stopped:
            raise Unverified(OTHER_COUNT)
        return tokens

    def _ended_by(self, choice: dict[str, Any]) -> int:
        """The token that ended the turn: as vLLM or SGLang reports it, else the template's own."""
        reported = (choice.get("stop_reason"), choice.get("matched_stop"))
        return next((i for i in reported if isinstance(i, int)), self._turn_end)

    def as_text(self, prompt: list[int]) -> str:
        """The prompt as text that a server reads as the same ids, with the BOS that it adds.

        Raises `Unverified` if there is no such text.
        """
        bos = self.template.bos_id
        ids = prompt[1:] if bos is not None and prompt[:1] == [bos] else prompt
        text = self.decode(ids)
        if self.encode(text) != ids:
            raise Unverified("prompt cannot be given to the endpoint as text")
        return text

    def decode(self, ids: list[int]) -> str:
        text: str = self.template.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def encode(self, text: str) -> list[int]:
        return list(self.template.tokenizer(text, add_special_tokens=False)["input_ids"])


def _end_of_turn(template: ChatTemplate) -> int:
    """The token that the template puts after an answer. Raises `InputError` if there is none."""
    plain = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    try:
        ids, mask, _ = template.mask(plain)
    except Unverified:
        ids, mask = [], []
    said = [i for i, supervised in zip(ids, mask, strict=True) if supervised]
    end: int | None = said[-1] if said and said[-1] in template.eos_ids else None
    if end is None:
        end = template.tokenizer.eos_token_id
    if end is None:
        raise InputError("the verifier's tokenizer has no token that ends a turn")
    return end
