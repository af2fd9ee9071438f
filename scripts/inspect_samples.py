#!/usr/bin/env python3
"""Look at what a corpus becomes before anything expensive starts.

Prints a few samples as the verifier will read them (supervised text against the rest, control
tokens shown), then lengths, counts and reasons, and what the chat template loses. Takes records
of collect_prompts as well as raw files in any layout. Starts no engine and writes nothing.
"""

import argparse
import heapq
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aerie.chat.encoding import Unverified
from aerie.chat.template import ChatTemplate
from aerie.common.errors import InputError
from aerie.common.files import digest
from aerie.common.text import beginning
from aerie.config import Samples, load_config
from aerie.corpus.layouts import Tally, check_source, conversations, parse_source, source_names
from aerie.corpus.prompt_sets import first_turn

STYLES = {"supervised": "bold green", "control": "magenta", "rest": "dim"}
BRACKETS = "⟦", "⟧"  # around supervised text where there are no colours


class Sample(NamedTuple):
    """A conversation as tokens: ids and mask of one length."""

    record: dict[str, Any]
    ids: list[int]
    mask: list[bool]


class Look:
    """What was seen of a corpus: counts by reason with examples, lengths, some samples."""

    def __init__(self, count: int):
        self.count = count
        self.kept = 0
        self.reasons: dict[str, list[str]] = {}
        self.numbers: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        self.with_losses = 0
        self.lengths: list[int] = []
        self.supervised: list[int] = []
        self._picked: list[tuple[int, int, Sample]] = []

    def drop(self, reason: str, record: dict[str, Any]) -> None:
        self.numbers[reason] += 1
        examples = self.reasons.setdefault(reason, [])
        if len(examples) < 3:
            examples.append(beginning(record))

    def keep(self, sample: Sample) -> None:
        self.kept += 1
        self.lengths.append(len(sample.ids))
        self.supervised.append(sum(sample.mask))
        # The same few of a corpus every time, from anywhere in it: those of the lowest hash.
        rank = -int(digest(sample.record["id"]), 16)
        heapq.heappush(self._picked, (rank, self.kept, sample))
        if len(self._picked) > self.count:
            heapq.heappop(self._picked)

    @property
    def samples(self) -> list[Sample]:
        return [sample for _, _, sample in sorted(self._picked, key=lambda p: p[1])]


def look(
    chat: ChatTemplate, records: Any, mode: str, limits: Samples, reasoning: bool, count: int
) -> Look:
    """Make samples of `records` as the stage would, and count."""
    seen = Look(count)
    for record in records:
        messages, tools = record["messages"], record.get("tools")
        try:
            lost = chat.losses(messages, tools)
            seen.losses.update(lost)
            seen.with_losses += bool(lost)
            if mode == "generate":
                ids = chat.prompt_ids(first_turn(record), tools)
                sample = Sample(record, ids, [False] * len(ids))
            else:
                masked = chat.mask(messages, tools, supervise_reasoning=reasoning)
                sample = Sample(record, masked.input_ids, masked.loss_mask)
        except Unverified as error:
            seen.drop(error.reason, record)
            continue
        if mode == "generate" and len(sample.ids) >= limits.max_length:
            seen.drop(f"prompt of {limits.max_length} tokens or more", record)
            continue
        # Longer samples are cut to the window.
        if mode == "keep" and sum(sample.mask[: limits.max_length]) < limits.min_supervised_tokens:
            seen.drop(f"under {limits.min_supervised_tokens} supervised tokens", record)
            continue
        seen.keep(sample)
    return seen


def sample_text(chat: ChatTemplate, sample: Sample, colours: bool, limit: int) -> Text:
    """A sample for the terminal; of every run of one kind at most about `limit` characters."""
    control = chat.control_ids
    kinds = [(i in control, m) for i, m in zip(sample.ids, sample.mask, strict=True)]
    text, position, inside = Text(), 0, False
    for (steers, supervised), run in itertools.groupby(kinds):
        length = len(list(run))
        part = chat.text_of(sample.ids, position, position + length)
        position += length
        if len(part) > limit:
            gone = len(part) - limit
            part = f"{part[: limit // 2]} […{gone:,} characters…] {part[-(limit // 2) :]}"
        style = STYLES["control" if steers else "supervised" if supervised else "rest"]
        if steers and supervised:
            style += " reverse"
        if not colours and supervised != inside:
            text.append(BRACKETS[0] if supervised else BRACKETS[1])
        inside = supervised
        text.append(printable(part), style)
    if inside and not colours:
        text.append(BRACKETS[1])
    return text


def printable(text: str) -> str:
    """Text without characters that would steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def show(console: Console, chat: ChatTemplate, seen: Look, tally: Tally, args: Any) -> None:
    colours = console.color_system is not None
    for number, sample in enumerate(seen.samples, 1):
        record = sample.record
        title = f"example {number}, from {record['source']} · {len(sample.ids):,} tokens"
        if args.mode == "keep":
            title += f", {sum(sample.mask):,} supervised"
        title += f" · record {record['id']}"
        console.print(Text(printable(title), "bold reverse"), soft_wrap=True)
        console.print(sample_text(chat, sample, colours, args.characters), soft_wrap=True)
        if args.mode == "generate":
            console.print(Text("… here the verifier answers", STYLES["supervised"]))
    console.print()
    if args.mode == "keep":
        legend = Text("supervised ", STYLES["supervised"])
        legend.append("control token", STYLES["control"])
        legend.append(" ")
        legend.append("one that ends a turn", STYLES["control"] + " reverse")
        legend.append(" ")
        legend.append("not supervised", STYLES["rest"])
        console.print(legend if colours else Text("".join(BRACKETS) + " supervised"))
    console.print(_numbers(seen, args.mode))
    if tally.dropped or seen.reasons:
        console.print(_reasons(seen, tally))
    for note, number in sorted(tally.changed.items()):
        console.print(f"changed: {number:,} × {note}", markup=False)
    for name, number in sorted(seen.losses.items()):
        console.print(
            f"lost by the chat template: {name} in {number:,} of {tally.records_in:,} records",
            style="yellow",
            markup=False,
        )

    allowed = Samples().max_lost_share
    if seen.with_losses > allowed * tally.records_in:
        console.print(
            f"more than samples.max_lost_share = {allowed:g} of the records lose something: the "
            "workflow would stop here",
            style="bold yellow",
            markup=False,
        )


def _numbers(seen: Look, mode: str) -> Table:
    table = Table("", "p50", "p90", "p99", "max", "sum", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    what = "prompt" if mode == "generate" else "sample"
    rows = [(f"tokens a {what}", sorted(seen.lengths))]
    if mode == "keep":
        rows.append(("supervised tokens", sorted(seen.supervised)))
    for name, values in rows:
        if not values:
            continue
        at = [values[min(len(values) - 1, int(q * len(values)))] for q in (0.5, 0.9, 0.99)]
        table.add_row(name, *(f"{v:,}" for v in [*at, values[-1], sum(values)]))
    return table


def _reasons(seen: Look, tally: Tally) -> Table:
    table = Table("dropped", "records", "for example", box=None, header_style="bold")
    table.columns[1].justify = "right"
    for reason, number in sorted(tally.dropped.items(), key=lambda item: -item[1]):
        examples = [e.get("place", "") for e in tally.examples.get(reason, [])]
        table.add_row(Text(printable(reason)), f"{number:,}", Text(", ".join(examples)))
    for reason, number in seen.numbers.most_common():
        examples = Text(printable(", ".join(map(str, seen.reasons[reason]))))
        table.add_row(Text(printable(reason)), f"{number:,}", examples)
    return table


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Show a few samples of a corpus as the verifier reads them, with counts."
    )
    parser.add_argument("--verifier", required=True, help="folder of the verifier's checkpoint")
    parser.add_argument(
        "--records",
        required=True,
        help="records (.jsonl.zst), or whatever collect_prompts.py takes as --source",
    )
    parser.add_argument("--count", type=int, default=3, help="samples to print")
    parser.add_argument(
        "--mode",
        choices=("keep", "generate"),
        default="keep",
        help="keep: the corpus's own answers; generate: the prompts that the verifier answers",
    )
    parser.add_argument("--scan", type=int, default=1000, help="records to look at (0: all)")
    parser.add_argument("--characters", type=int, default=600, help="characters shown of a text")
    parser.add_argument("--max-length", type=int, default=Samples().max_length)
    parser.add_argument(
        "--min-supervised-tokens", type=int, default=Samples().min_supervised_tokens
    )
    parser.add_argument(
        "--no-reasoning", action="store_true", help="do not supervise the assistant's reasoning"
    )
    parser.add_argument("--trust-remote-code", action="store_true")
    return parser.parse_args()


def main() -> int:
    args = read_arguments()
    console = Console(highlight=False)
    try:
        chat = ChatTemplate.load(Path(args.verifier), args.trust_remote_code)
        policy = {"on_bad_record": "drop", "on_unknown_role": "drop"}
        given = {"sources": [parse_source(args.records)], **policy}
        corpus = load_config({"corpus": given}).corpus
        source, name = corpus.sources[0], source_names(corpus.sources)[0]
        check_source(source, corpus)
        tally = Tally(args.records)
        found = conversations(source, name, corpus, args.mode, tally)
        records = itertools.islice((c.record for c in found), args.scan or None)
        limits = Samples(
            max_length=args.max_length, min_supervised_tokens=args.min_supervised_tokens
        )
        seen = look(chat, records, args.mode, limits, not args.no_reasoning, max(1, args.count))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or args.records}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    show(console, chat, seen, tally, args)
    read = f"{seen.kept:,} of {tally.records_in:,} records read become samples"
    if args.scan and tally.records_in >= args.scan:
        read += f" (the first {args.scan:,} usable were looked at; --scan 0 for all)"
    console.print(read, markup=False)
    if not seen.kept:
        print(f"error: {args.records}: no record becomes a sample", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
