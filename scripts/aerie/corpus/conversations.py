"""Records to conversations, with a count for every record that is not used."""

import json
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aerie.common.errors import InputError
from aerie.common.files import digest
from aerie.config import Corpus, Source
from aerie.corpus.layouts import ANSWERS, find_layout
from aerie.corpus.messages import Message, to_message, to_tools
from aerie.corpus.odd_turns import settle
from aerie.corpus.reading import source_records
from aerie.corpus.records import Meter
from aerie.corpus.report import Tally
from aerie.corpus.turns import first_of, is_missing, role_of, turn_list, turns_in, user
from aerie.corpus.unusable import Unusable, wrong_type

Conversation = dict[str, Any]
"""`id`, `source`, `messages` and, where given, `tools` (docs/corpus.md)."""


class Located(NamedTuple):
    """A conversation, the same as JSON in UTF-8, and where its record is."""

    conversation: Conversation
    line: bytes
    file: str
    place: str


def conversations(
    source: Source,
    name: str,
    corpus: Corpus,
    mode: str,
    tally: Tally,
    meter: Meter | None = None,
) -> Iterator[Located]:
    """The conversations of a source named `name`; `mode` is `generate` or `keep`.

    A record that cannot be used is counted in `tally`, or raises `InputError` where `corpus` says
    so.
    """
    for file, (place, value, fault) in source_records(source, meter):
        tally.records_in += 1
        try:
            if fault:
                raise Unusable("unreadable", fault, "on_bad_record")
            layout, messages, tools, notes = to_conversation(value, corpus.roles, source.column)
            messages, more = settle(messages, mode)
            conversation: Conversation = {
                "id": digest(messages, tools),
                "source": name,
                "messages": messages,
            }
            if tools:
                conversation["tools"] = tools
            line = json.dumps(conversation, ensure_ascii=False).encode()
        except Exception as error:  # a fault of the program also names the record
            refuse(_as_unusable(error), corpus, tally, file, place, value)
        else:
            tally.layouts[layout] = tally.layouts.get(layout, 0) + 1
            for note in notes + more:
                tally.changed[note] = tally.changed.get(note, 0) + 1
            yield Located(conversation, line, file, place)


OTHER_MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
"""Keys of records that are not text alone."""


def to_conversation(
    record: Any, roles: Mapping[str, str] | None = None, column: str | None = None
) -> tuple[str, list[Message], list[dict[str, Any]], list[str]]:
    """Layout, messages, tools and notes (what was not used) of a record.

    `roles`: further role names; `column`: the key that holds the prompt or the messages. Raises
    `Unusable` with the reason when the record is not usable.
    """
    if column is not None:
        if not isinstance(record, dict) or column not in record:
            found = ", ".join(map(str, record)) if isinstance(record, dict) else record
            raise Unusable(
                "unknown layout",
                f"no column {column!r}; found {str(found)[:200]}",
                "on_bad_record",
            )
        value = turns_in(record[column])
        turns = turn_list(value) if isinstance(value, list) else [user(value)]
        layout = "column"
    else:
        layout, turns = find_layout(record)
    notes = []
    tools: list[dict[str, Any]] = []
    if isinstance(record, dict):
        for key in OTHER_MEDIA & record.keys():
            if record[key]:
                raise Unusable("not text", f"the record has {key!r}")
        tools = to_tools(first_of(record, "tools", "functions"))
        system = first_of(record, "system", "system_prompt")
        if not isinstance(system, str | None) and not is_missing(system):
            raise wrong_type("system", system, "text")
        if isinstance(system, str) and system.strip():
            given = [t.get("content") for t in turns if role_of(t) == "system"]
            if not given:
                turns = [{"role": "system", "content": system}, *turns]
            elif system not in given:
                notes.append("system text beside a system turn not used")
        if "rejected" in record:
            notes.append("rejected answer not used")
        if isinstance(record.get("instances"), list) and len(record["instances"]) > 1:
            notes.append("further instances not used")
        answers = [a for a in (record.get(key) for key in ANSWERS) if isinstance(a, list)]
        if any(len(a) > 1 and all(isinstance(text, str) for text in a) for a in answers):
            notes.append("further answers not used")
    messages = [to_message(turn, number, roles) for number, turn in enumerate(turns, 1)]
    return layout, messages, tools, notes


def _as_unusable(fault: Exception) -> Unusable:
    """The reason for which a record is refused; a fault of the program says where it is."""
    if isinstance(fault, Unusable):
        return fault
    if isinstance(fault, UnicodeEncodeError):
        what = "text with a byte that is not UTF-8, or with half a surrogate pair"
        return Unusable("broken Unicode", what, "on_bad_record")
    if isinstance(fault, RecursionError):
        return Unusable("unreadable", "nested too deeply", "on_bad_record")
    at = traceback.extract_tb(fault.__traceback__)[-1]
    where = f"{Path(at.filename).name}, line {at.lineno}"
    detail = f"{type(fault).__name__}: {fault} ({where}); please report it"
    return Unusable("not foreseen", detail, "on_bad_record")


def refuse(
    fault: Unusable, corpus: Corpus, tally: Tally, file: str, place: str, value: Any
) -> None:
    """Count the record, or raise `InputError` where the configuration stops at such records."""
    if fault.policy and getattr(corpus, fault.policy) == "stop":
        raise InputError(
            f"{file}: {place}: {fault}. {fault.hint}Repair the record, or drop and count such "
            f"records: corpus.{fault.policy}: drop"
        )
    given = value.get("id") if isinstance(value, dict) else None
    given = given if isinstance(given, str | int) else None
    tally.drop(fault.reason, file=file, place=place, record=given, detail=fault.detail)
