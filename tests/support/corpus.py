"""Records for tests of the corpus, and what they become in short."""

import json

import pytest

from aerie.config import Corpus, Source
from aerie.corpus.conversations import conversations, to_conversation
from aerie.corpus.report import Tally
from support.paths import SHARED

shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not there")
USER, BOT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


def short(messages):
    """Roles and texts as `u:…`, one a message; tool calls as `a!name`."""
    return [
        f"{m['role'][0]}:{m['content']}"
        + "".join(f"!{c['function']['name']}" for c in m.get("tool_calls", []))
        for m in messages
    ]


def turns_of(record):
    return short(to_conversation(record)[1])


def read(path, mode="keep", **settings):
    """Conversations and the tally of one file with the given `corpus` settings."""
    tally = Tally(path=str(path))
    source = Source(path=str(path))
    found = conversations(source, "test", Corpus(**settings), mode, tally)
    return [c.conversation for c in found], tally


def json_lines(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path
