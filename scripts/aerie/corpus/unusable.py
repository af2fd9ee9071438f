"""Records that cannot be used."""

import json
from typing import Any


class Unusable(Exception):
    """A record that is not used: `reason` is counted, `detail` is shown in examples.

    `policy` names the key of `corpus` that decides whether the run stops (`on_bad_record`,
    `on_unknown_role`); `hint` says what to do then. Without a policy the record is dropped.
    """

    def __init__(
        self, reason: str, detail: str = "", policy: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.policy, self.hint = reason, detail, policy, hint


def wrong_type(what: str, found: Any, expected: str) -> Unusable:
    shown = json.dumps(found, default=str, ensure_ascii=True)[:80]
    detail = f"{what} is {type(found).__name__} {shown}; expected {expected}"
    return Unusable("wrong type", detail, "on_bad_record")
