"""What a corpus becomes, looked at before anything expensive starts.

Prints a few samples as the verifier will read them (supervised text against the rest, control
tokens shown), then lengths, counts and reasons, and what the chat template drops. Starts no engine
and writes nothing.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aerie.chat.template import ChatTemplate
from aerie.chat.unverified import Unverified
from aerie.common.errors import InputError
from aerie.common.files import digest
from aerie.common.text import beginning
from aerie.config import Corpus, Samples, Source
from aerie.corpus.conversations import Conversation, conversations
from aerie.corpus.prompt_sets import first_turn
from aerie.corpus.report import Tally
from aerie.corpus.sources import check_source, source_names

STYLES = {"supervised": "bold green", "control": "magenta", "rest": "dim"}
BRACKETS = "⟦", "⟧"  # around supervised text where there are no colours


class ShownSample(NamedTuple):
    """A conversation as tokens: `ids` and `mask` have the same length."""

    conversation: Conversation
    ids: list[int]
    mask: list[bool]


class Findings:
    """What a corpus becomes: counts by reason with examples, lengths, `count` samples."""

    def __init__(self, count: int):
        self.count = count
        self.kept = 0
        self.reasons: dict[str, list[str]] = {}
        self.numbers: Counter[str] = Counter()
        self.dropped_fields: Counter[str] = Counter()
        self.with_dropped_fields = 0
        self.lengths: list[int] = []
        self.supervised: list[int] = []
        self._picked: list[tuple[int, int, ShownSample]] = []

    def drop(self, reason: str, conversation: Conversation) -> None:
        self.numbers[reason] += 1
        examples = self.reasons.setdefault(reason, [])
        if len(examples) < 3:
            examples.append(beginning(conversation))

    def keep(self, sample: ShownSample) -> None:
        self.kept += 1
        self.lengths.append(len(sample.ids))
        self.supervised.append(sum(sample.mask))
        # The same samples every time, from anywhere in the corpus: those with the lowest hash.
        rank = -int(digest(sample.conversation["id"]), 16)
        heapq.heappush(self._picked, (rank, self.kept, sample))
        if len(self._picked) > self.count:
            heapq.heappop(self._picked)

    @property
    def samples(self) -> list[ShownSample]:
        return [sample for _, _, sample in sorted(self._picked, key=lambda p: p[1])]


def inspect(
    verifier: Path,
    source: Source,
    mode: str,
    limits: Samples,
    *,
    count: int,
    scan: int,
    characters: int,
    trust_remote_code: bool,
) -> None:
    """Print what becomes of a source.

    `verifier`: the checkpoint's folder; `mode`: `generate` or `keep`; `count`: samples to print;
    `scan`: usable records to look at (0: all); `characters`: shown of a text. Raises `InputError`
    when no record becomes a sample.
    """
    console = Console(highlight=False)
    chat = ChatTemplate.load(verifier, trust_remote_code)
    corpus = Corpus(sources=[source], on_bad_record="drop", on_unknown_role="drop")
    check_source(source, corpus)
    tally = Tally(path=source.path)
    found = conversations(source, source_names([source])[0], corpus, mode, tally)
    scanned = itertools.islice((c.conversation for c in found), scan or None)
    findings = _make_samples(chat, scanned, mode, limits, max(1, count))
    _show(console, chat, findings, tally, mode, limits, characters)
    read = f"{findings.kept:,} of {tally.records_in:,} records read become samples"
    if scan and tally.records_in >= scan:
        read += f" (only the first {scan:,} usable ones were read; --scan 0 reads all)"
    console.print(read, markup=False)
    if not findings.kept:
        raise InputError(f"{source.path}: no record becomes a sample")


def _make_samples(
    chat: ChatTemplate,
    scanned: Iterable[Conversation],
    mode: str,
    limits: Samples,
    count: int,
) -> Findings:
    """Make samples as the stage `tokenize_samples` would."""
    findings = Findings(count)
    for conversation in scanned:
        messages, tools = conversation["messages"], conversation.get("tools")
        try:
            dropped = chat.dropped_fields(messages, tools)
            findings.dropped_fields.update(dropped)
            findings.with_dropped_fields += bool(dropped)
            if mode == "generate":
                ids = chat.prompt_ids(first_turn(conversation), tools)
                sample = ShownSample(conversation, ids, [False] * len(ids))
            else:
                masked = chat.mask(messages, tools, limits.supervise_reasoning)
                sample = ShownSample(conversation, masked.input_ids, masked.loss_mask)
        except Unverified as error:
            findings.drop(error.reason, conversation)
            continue
        if mode == "generate" and len(sample.ids) >= limits.max_length:
            findings.drop(f"prompt of {limits.max_length} tokens or more", conversation)
            continue
        # Longer samples are cut to the window.
        if mode == "keep" and sum(sample.mask[: limits.max_length]) < limits.min_supervised_tokens:
            reason = f"under {limits.min_supervised_tokens} supervised tokens"
            findings.drop(reason, conversation)
            continue
        findings.keep(sample)
    return findings


def _sample_text(chat: ChatTemplate, sample: ShownSample, colours: bool, limit: int) -> Text:
    """A sample for the terminal, with about `limit` characters of every run of one kind."""
    control = chat.control_ids
    kinds = [(i in control, m) for i, m in zip(sample.ids, sample.mask, strict=True)]
    text, position, inside = Text(), 0, False
    for (steers, supervised), run in itertools.groupby(kinds):
        length = len(list(run))
        part = chat.text_of(sample.ids, position, position + length)
        position += length
        if len(part) > limit:
            cut = len(part) - limit
            part = f"{part[: limit // 2]} […{cut:,} characters…] {part[-(limit // 2) :]}"
        style = STYLES["control" if steers else "supervised" if supervised else "rest"]
        if steers and supervised:
            style += " reverse"
        if not colours and supervised != inside:
            text.append(BRACKETS[0] if supervised else BRACKETS[1])
        inside = supervised
        text.append(_printable(part), style)
    if inside and not colours:
        text.append(BRACKETS[1])
    return text


def _printable(text: str) -> str:
    """The text with characters that control the terminal escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _show(
    console: Console,
    chat: ChatTemplate,
    findings: Findings,
    tally: Tally,
    mode: str,
    limits: Samples,
    characters: int,
) -> None:
    colours = console.color_system is not None
    for number, sample in enumerate(findings.samples, 1):
        conversation = sample.conversation
        title = f"example {number}, from {conversation['source']} · {len(sample.ids):,} tokens"
        if mode == "keep":
            title += f", {sum(sample.mask):,} supervised"
        title += f" · record {conversation['id']}"
        console.print(Text(_printable(title), "bold reverse"), soft_wrap=True)
        console.print(_sample_text(chat, sample, colours, characters), soft_wrap=True)
        if mode == "generate":
            console.print(Text("… here the verifier answers", STYLES["supervised"]))
    console.print()
    if mode == "keep":
        legend = Text("supervised ", STYLES["supervised"])
        legend.append("control token", STYLES["control"])
        legend.append(" ")
        legend.append("one that ends a turn", STYLES["control"] + " reverse")
        legend.append(" ")
        legend.append("not supervised", STYLES["rest"])
        console.print(legend if colours else Text("".join(BRACKETS) + " supervised"))
    console.print(_numbers(findings, mode))
    if tally.dropped or findings.reasons:
        console.print(_reasons(findings, tally))
    for note, number in sorted(tally.changed.items()):
        console.print(f"changed: {number:,} × {note}", markup=False)
    for name, number in sorted(findings.dropped_fields.items()):
        console.print(
            f"dropped by the chat template: {name} in {number:,} of {tally.records_in:,} records",
            style="yellow",
            markup=False,
        )
    allowed = limits.max_lost_share
    if findings.with_dropped_fields > allowed * tally.records_in:
        console.print(
            f"more than samples.max_lost_share = {allowed:g} of the records lose something: the "
            "workflow would stop here",
            style="bold yellow",
            markup=False,
        )


def _numbers(findings: Findings, mode: str) -> Table:
    table = Table("", "p50", "p90", "p99", "max", "sum", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    what = "prompt" if mode == "generate" else "sample"
    rows = [(f"tokens a {what}", sorted(findings.lengths))]
    if mode == "keep":
        rows.append(("supervised tokens", sorted(findings.supervised)))
    for name, values in rows:
        if not values:
            continue
        at = [values[min(len(values) - 1, int(q * len(values)))] for q in (0.5, 0.9, 0.99)]
        table.add_row(name, *(f"{v:,}" for v in [*at, values[-1], sum(values)]))
    return table


def _reasons(findings: Findings, tally: Tally) -> Table:
    table = Table("dropped", "records", "for example", box=None, header_style="bold")
    table.columns[1].justify = "right"
    for reason, number in sorted(tally.dropped.items(), key=lambda item: -item[1]):
        examples = [e.get("place", "") for e in tally.examples.get(reason, [])]
        table.add_row(Text(_printable(reason)), f"{number:,}", Text(", ".join(examples)))
    for reason, number in findings.numbers.most_common():
        shown = Text(_printable(", ".join(findings.reasons[reason])))
        table.add_row(Text(_printable(reason)), f"{number:,}", shown)
    return table
