#!/usr/bin/env python3
"""Make token rows with loss masks of the conversations, and cut them into shards."""

from pathlib import Path

from aerie.chat.template import ChatTemplate, Unverified
from aerie.common import cli
from aerie.common.errors import InputError
from aerie.common.files import read_json, read_json_lines, write_json
from aerie.samples import tokenize as samples


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--train", type=Path, required=True, help="train.jsonl.zst")
    parser.add_argument("--heldout", type=Path, required=True, help="heldout.jsonl.zst")
    parser.add_argument("--verifier", type=Path, required=True, help="fingerprint.json")
    parser.add_argument("--responses", type=Path, help="manifest.json; absent: keep own answers")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--max-length", type=int, required=True, help="tokens a sample")
    parser.add_argument("--min-supervised-tokens", type=int, required=True)
    parser.add_argument("--min-kept-share", type=float, required=True)
    parser.add_argument("--max-lost-share", type=float, required=True)
    parser.add_argument("--no-reasoning", action="store_true", help="do not train on reasoning")
    parser.add_argument("--samples-per-shard", type=int, required=True)
    parser.add_argument("--last-state", required=True, help="all or supervised")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--samples", type=Path, required=True, help="samples.parquet, written")
    parser.add_argument("--shards", type=Path, required=True, help="shards.json, written")
    parser.add_argument("--report", type=Path, required=True, help="report.json, written")
    args = parser.parse_args()

    verifier = cli.read_fingerprint(args.verifier)
    limits = {
        "max_length": args.max_length,
        "min_supervised_tokens": args.min_supervised_tokens,
    }
    splits = {
        "train": list(read_json_lines(args.train)),
        "heldout": list(read_json_lines(args.heldout)),
    }
    template = ChatTemplate.load(Path(verifier["path"]), args.trust_remote_code)
    if args.responses:
        from aerie.generation.answers import AnswerStore

        wanted = {r["id"] for records in splits.values() for r in records}
        answers = AnswerStore(args.store, read_json(args.responses)["key"]).load(wanted)

        def make_rows(record, split):
            if record["id"] not in answers:
                raise InputError(
                    f"{args.responses}: the answer to record {record['id']} is gone from the "
                    f"store; delete that file and run again, it is generated anew"
                )
            return samples.rows_of_answer(record, split, answers[record["id"]], limits)
    else:

        def make_rows(record, split):
            return samples.rows_of_conversation(
                record, split, template, limits, not args.no_reasoning
            )

    counts, rows, shards, named = samples.Counts(), [], [], set()
    for split, records in splits.items():
        for group in samples.group_by_shard(records, args.samples_per_shard):
            of_group = []
            for position in group:
                record = records[position]
                counts.records += 1
                try:
                    lost = template.dropped_fields(record["messages"], record.get("tools"))
                    counts.lose(record["id"], lost)
                    of_group += make_rows(record, split)
                    counts.kept += 1
                except samples.Dropped as reason:
                    counts.drop(record["id"], str(reason))
                except Unverified as error:
                    counts.drop(record["id"], f"the chat template refuses it: {error}")
            if not of_group:
                continue
            shard = samples.describe_shard(split, of_group, args.last_state)
            if shard["id"] in named:
                # One file of states, and two lists of samples for it: one would be lost.
                for record in {row.record: None for row in of_group}:
                    counts.kept -= 1
                    counts.drop(record, "the same tokens as another shard, sample by sample")
                continue
            named.add(shard["id"])
            shards.append(shard)
            rows += of_group
    report = {
        **counts.report(),
        **{split: samples.summarize([r for r in rows if r.split == split]) for split in splits},
        "shards": len(shards),
    }
    if counts.kept < args.min_kept_share * counts.records or not rows:
        raise InputError(
            f"of {counts.records} records only {counts.kept} became samples, under "
            f"samples.min_kept_share = {args.min_kept_share}; dropped: {dict(counts.dropped)}"
        )
    if counts.with_losses > args.max_lost_share * counts.records:
        raise InputError(
            f"the chat template loses something of {counts.with_losses} of {counts.records} "
            f"records, more than samples.max_lost_share = {args.max_lost_share}: "
            f"{dict(counts.lost)}; records: {counts.examples}"
        )
    samples.write_samples(args.samples, rows)
    write_json(args.shards, {"shards": shards})
    write_json(args.report, report)


if __name__ == "__main__":
    cli.run(main)
