"""The section `notify`."""

from typing import Annotated, Literal

from pydantic import AfterValidator

from aerie.config.section import Section


def _check_variable(name: str) -> str:
    # Not with the value that was found: it may be the address.
    if not name.isidentifier() or not name.isascii():
        raise ValueError(
            "expected the name of an environment variable, such as AERIE_WEBHOOK; the address "
            "itself, which is a secret, goes into that variable"
        )
    return name


class Notify(Section):
    """How to report that a job stalled, or that a run failed or ended. No change here reruns
    anything."""

    command: str | None = None
    """Shell command; it gets the event as JSON on its standard input and as `AERIE_EVENT`,
    `AERIE_RUN`, `AERIE_TEXT` and so on (null: none). Name secrets in it as variables, `$TOKEN`."""
    webhook_env: Annotated[str, AfterValidator(_check_variable)] | None = None
    """Name of the environment variable that holds an address to which the event is posted as
    JSON (null: none)."""
    events: list[Literal["failure", "stall", "end"]] = ["failure", "stall", "end"]
    """What is reported: `stall`: a job was stopped because it made no progress, or for its loss or
    a full disk; `failure`: a run ended without all of its results; `end`: with them."""
