"""The stage `tokenize_samples`: records and answers in, samples, shards and a report out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aerie.chat.template import ChatTemplate
from aerie.chat.unverified import Unverified
from aerie.common.errors import InputError
from aerie.config import HiddenStates, Samples
from aerie.samples.conversion import Dropped, sample_of_conversation, samples_of_answer
from aerie.samples.counting import RecordCounter
from aerie.samples.file import TokenizedSample
from aerie.samples.report import SamplesReport
from aerie.samples.shards import ShardList, ShardPlan, Splits, group_splits, plan_shard
from aerie.samples.stored_answer import StoredAnswer


@dataclass
class Tokenized:
    """All samples of a run, in order, and their shards."""

    samples: list[TokenizedSample] = field(default_factory=list)
    shards: dict[str, ShardPlan] = field(default_factory=dict)
    tally: RecordCounter = field(default_factory=RecordCounter)

    @property
    def shard_list(self) -> ShardList:
        return ShardList(shards=list(self.shards.values()))

    @property
    def report(self) -> SamplesReport:
        return self.tally.report(self.samples, len(self.shards))


def tokenize_samples(
    splits: Splits,
    template: ChatTemplate,
    answers: Mapping[str, StoredAnswer] | None,
    settings: Samples,
    hidden_states: HiddenStates,
) -> Tokenized:
    """Tokenize all records and cut them into shards.

    `answers` by record id; None: the conversations' own answers are used. Raises `InputError` when
    fewer records than `min_kept_share` yield a sample, or the chat template leaves something out of
    more than `max_lost_share` of them.
    """
    made = Tokenized()
    tally = made.tally

    def convert(record: dict[str, Any], split: str) -> list[TokenizedSample]:
        if answers is None:
            return [sample_of_conversation(record, split, template, settings)]
        return samples_of_answer(record, split, answers[record["id"]], settings)

    for split, records in group_splits(splits, hidden_states.samples_per_shard):
        samples = []
        for record in records:
            tally.records += 1
            try:
                tally.lose(
                    record["id"], template.dropped_fields(record["messages"], record.get("tools"))
                )
                samples += convert(record, split)
                tally.kept += 1
            except Dropped as reason:
                tally.drop(record["id"], str(reason))
            except Unverified as error:
                tally.drop(record["id"], f"the chat template refuses it: {error}")
        if not samples:
            continue
        shard = plan_shard(split, samples, hidden_states.last_state)
        if shard.id in made.shards:
            # One file of states cannot belong to two lists of samples.
            for identity in dict.fromkeys(sample.record for sample in samples):
                tally.kept -= 1
                tally.drop(identity, "the same tokens as another shard, sample by sample")
            continue
        made.shards[shard.id] = shard
        made.samples += samples
    _check(tally, settings)
    return made


def _check(tally: RecordCounter, settings: Samples) -> None:
    if tally.kept < settings.min_kept_share * tally.records or not tally.kept:
        raise InputError(
            f"only {tally.kept} of {tally.records} records became samples, fewer than "
            f"samples.min_kept_share = {settings.min_kept_share} allows; dropped: "
            f"{dict(tally.dropped)}. Correct the records, or lower that key"
        )
    if tally.incomplete > settings.max_lost_share * tally.records:
        raise InputError(
            f"the chat template leaves something out of {tally.incomplete} of {tally.records} "
            f"records, more than samples.max_lost_share = {settings.max_lost_share} allows: "
            f"{dict(tally.lost)}; records: {tally.examples}. Use a template that renders it, or "
            "raise that key"
        )
