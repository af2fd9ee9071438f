#!/usr/bin/env python3
"""Look after the store of hidden states: verify, list, show, collect, export and import.

Run from the folder of the workflow. Exit status 1: something is wrong, and was said.
"""

import argparse
import concurrent.futures
import json
import math
import os
import random
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from aerie.common import cli
from aerie.common.errors import InputError, UnusableStates
from aerie.common.files import read_optional, write_json
from aerie.common.leases import Leases
from aerie.common.progress import JobProgress
from aerie.maintenance.verify import (
    find_garbage,
    find_shard,
    missing_shards,
    read_named,
    set_aside,
    shard_files,
    summarize_shard,
    verify_shard,
)
from aerie.states.shard import Convention, Shard, Store, Teacher


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--store", type=Path, default=Path("results/store"), help="%(default)s")
    parser.add_argument(
        "--results",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder of runs that use it, may be given several times (none: the one it lies in, "
        "else results)",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function: Any, name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(function=function)
        return added

    verify = command(verify_store, "verify", "read shards whole and say what is wrong with them")
    verify.add_argument("shards", nargs="*", metavar="SHARD", help="ids or files; none: all")
    verify.add_argument(
        "--sample", type=sample_size, metavar="N|SHARE", help="only so many, chosen at random"
    )
    verify.add_argument("--set-aside", action="store_true", help="repair: move damaged files aside")

    listing = command(list_store, "list", "conventions and their shards")
    listing.add_argument("--json", action="store_true")

    show = command(show_shard, "show", "metadata and samples of one shard")
    show.add_argument("shard", metavar="SHARD", help="id, the beginning of one, or a file")
    show.add_argument("--json", action="store_true")

    collect = command(collect_garbage, "gc", "say what no run needs, and delete it if asked to")
    collect.add_argument("--delete", action="store_true", help="delete; without: only say")

    export = command(export_states, "export", "write a run's states as another trainer reads them")
    export.add_argument("--to", choices=["speculators", "specforge"], required=True)
    export.add_argument("--run", type=Path, required=True, help="such as results/demo")
    export.add_argument("folder", type=Path, metavar="DIR", help="new folder")

    imports = command(import_states, "import", "take in states that another tool extracted")
    imports.add_argument("--run", type=Path, required=True, help="whose verifier it is")
    imports.add_argument(
        "--layer-ids", type=int, nargs="+", required=True, help="that feed the drafter; in order"
    )
    imports.add_argument(
        "--counting",
        choices=["entering", "output"],
        required=True,
        help="id k is the state entering layer k (vLLM, speculators) or its output (SGLang)",
    )
    imports.add_argument(
        "--last-state",
        choices=["before", "after-norm"],
        required=True,
        help="the last state is before (vLLM, speculators) or after the final norm (SGLang)",
    )
    imports.add_argument(
        "--answers",
        choices=["greedy", "other"],
        required=True,
        help="the supervised tokens are the verifier's greedy answers, or sampled or foreign",
    )
    imports.add_argument("--format", default="lossless", help="hidden_states.format of the run")
    imports.add_argument("folder", type=Path, metavar="DIR")

    args = parser.parse_args()
    if not args.store.is_dir():
        raise InputError(f"{args.store}: no such folder; run from the workflow's, or give --store")
    try:
        args.function(args)
        sys.stdout.flush()
    except BrokenPipeError:  # of `… | head`; what is left to be printed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except UnusableStates as error:
        raise UnusableStates(
            f"{error}. `store.py verify --set-aside` moves damaged files aside; the next run makes "
            "them anew"
        ) from error


def sample_size(text: str) -> float:
    """A number of shards, or a share below 1 of them."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 < value < math.inf or (value >= 1 and value != int(value)):
        raise argparse.ArgumentTypeError(f"{text}: expected a number of shards, or a share below 1")
    return value


def size_text(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def results_of(args: argparse.Namespace) -> list[Path]:
    """Folders of the runs that may name shards of the store."""
    for place in args.results or []:
        if not place.is_dir():
            raise InputError(f"--results {place}: no such folder")
    beside = args.store.parent
    return args.results or [beside if beside.name == "results" else Path("results")]


def verify_store(args: argparse.Namespace) -> None:
    named = read_named(args.store, results_of(args))
    if args.shards:
        paths = [find_shard(args.store, name) for name in args.shards]
        findings = []
    else:
        paths = shard_files(args.store)
        findings = missing_shards(args.store, named)
    if args.sample:
        number = int(args.sample) if args.sample >= 1 else max(1, round(args.sample * len(paths)))
        paths = sorted(random.sample(paths, min(number, len(paths))))
    tokens = 0
    with (
        JobProgress("verify", len(paths), "shards") as bar,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        for done, (read, finding) in enumerate(pool.map(lambda p: verify_shard(p, named), paths)):
            tokens += read
            if finding:
                findings.append(finding)
            bar.update(done + 1, f"{len(findings)} wrong")
    for finding in findings:
        print(f"{finding.path}")
        for problem in finding.problems[:5]:
            print(f"  {problem}")
        if len(finding.problems) > 5:
            print(f"  and {len(finding.problems) - 5} more")
        if finding.repair:
            print(f"  repair: {finding.repair}")
        if args.set_aside:
            set_aside(finding)
    for path, error in named.unreadable.items():
        print(f"{path}\n  {error}\n  repair: delete it and start its run again")
    wrong = len(findings) + len(named.unreadable)
    print(f"{len(paths)} shards with {tokens} tokens read, {wrong} wrong")
    if any(finding.repair for finding in findings):
        print(
            "Repaired as said: now start the runs again (`make run`, with their CONFIG)."
            if args.set_aside
            else "`store.py verify --set-aside` moves and deletes what is said above."
        )
    sys.exit(1 if wrong else 0)


def list_store(args: argparse.Namespace) -> None:
    named = read_named(args.store, results_of(args))
    conventions: dict[str, list[dict[str, Any]]] = {}
    for path in shard_files(args.store):
        conventions.setdefault(path.parent.name, []).append(summarize_shard(path, named))
    if args.json:
        print(json.dumps(conventions, indent=1))
        return
    for key, shards in conventions.items():
        whole = [s for s in shards if "error" not in s]
        print(f"\n{key}")
        if whole:
            first = whole[0]
            total, raw = sum(s["bytes"] for s in whole), sum(s["raw_bytes"] for s in whole)
            print(
                f"  verifier {first['verifier'][:12]}, layers {first['layer_ids']}, width "
                f"{first['hidden_size']}, {first['format']}\n"
                f"  {len(whole)} shards, {sum(s['samples'] for s in whole)} samples, "
                f"{sum(s['tokens'] for s in whole)} tokens, {size_text(total)}, "
                f"{total / max(1, raw):.3f} of raw"
            )
        for shard in shards:
            runs = ", ".join(shard["runs"]) or "no run"
            if "error" in shard:
                print(f"  {shard['id']}  {size_text(shard['bytes'])}  {shard['error']}  ({runs})")
            else:
                print(
                    f"  {shard['id']}  {shard['samples']:4} samples {shard['tokens']:8} tokens "
                    f"{size_text(shard['bytes']):>9}  {shard['ratio']:.3f}  {runs}"
                )
    if not conventions:
        print(f"{args.store}: no shards")


def show_shard(args: argparse.Namespace) -> None:
    path = find_shard(args.store, args.shard)
    about = summarize_shard(path, read_named(args.store, results_of(args)))
    with Shard(path) as shard:
        about["samples"] = []
        for number, entry in enumerate(shard.samples):
            norms = shard.read(number).states.float().norm(dim=-1).mean(0)
            about["samples"].append(
                {
                    "id": entry["id"],
                    "tokens": entry["tokens"],
                    "mean_norm": {
                        str(layer): round(norm, 4)
                        for layer, norm in zip(shard.layer_ids, norms.tolist(), strict=True)
                    },
                }
            )
    if args.json:
        print(json.dumps({"file": str(path), **about}, indent=1))
        return
    print(path)
    for name in ("verifier", "layer_ids", "hidden_size", "format", "tokens", "runs"):
        print(f"  {name:<12} {about[name]}")
    print(f"  {'bytes':<12} {about['bytes']}, {about['ratio']:.3f} of raw")
    print("  samples: tokens, mean norm by layer, id")
    for sample in about["samples"]:
        norms = "  ".join(f"h[{k}] {v:.4g}" for k, v in sample["mean_norm"].items())
        print(f"  {sample['tokens']:6}  {norms}  {sample['id']}")


def collect_garbage(args: argparse.Namespace) -> None:
    results = results_of(args)
    if args.store.parent.name != "results" and not args.results:
        raise InputError(
            f"{args.store} may be used by runs of several folders, and what they need must not be "
            "collected: name them all, such as --results results --results ../other/results"
        )
    for place in results if args.delete else []:
        locks = place.parent / ".snakemake/locks"
        if locks.is_dir() and any(locks.iterdir()):
            raise InputError(
                f"{locks} is not empty: Snakemake works here, or was killed. Let it finish, or run "
                "it again, or `snakemake --unlock`; nothing was deleted"
            )
        for lease in place.glob("*/.run.lease"):
            if who := Leases().alive(lease.parent / "run"):
                raise InputError(
                    f"{lease.parent}: a run is at work ({who}); let it finish, nothing was deleted"
                )
    named = read_named(args.store, results_of(args))
    for run, reason in named.unfinished.items():
        print(f"{run} is unfinished: {reason}")
    for path, error in named.unreadable.items():
        print(f"{path}: {error}")
    if named.unfinished or named.unreadable:
        print("So no shard is collected; finish these runs or delete their folders.")
    found = find_garbage(args.store, named)
    kept = 0
    for item in list(found):
        print(f"{size_text(item.bytes):>9}  {item.path}  ({item.why})")
        try:
            if args.delete:
                delete(item.path)
        except OSError as error:
            print(f"           not deleted: {error.strerror}")
            found.remove(item)
            kept += 1
    total = sum(item.bytes for item in found)
    print(
        f"{len(found)} files, {total} bytes ({size_text(total)}) "
        + ("deleted" if args.delete else "could be deleted: `store.py gc --delete`")
        + (f"; {kept} could not be" if kept else "")
    )
    sys.exit(1 if kept else 0)


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def export_states(args: argparse.Namespace) -> None:
    from aerie.maintenance import exchange

    source = exchange.read_source(args.run, args.store)
    exchange.prepare_folder(args.folder, source)
    number = len(source.places)
    with JobProgress("export", number, "samples") as bar:
        if args.to == "speculators":
            exchange.export_speculators(source, args.folder, bar.update)
        else:
            verifier = cli.read_fingerprint(args.run / "verifier/fingerprint.json")
            teacher = Teacher(Path(verifier["path"]))
            exchange.export_specforge(source, args.folder, teacher, bar.update)
    held = exchange.describe_files(source, args.to)
    origin = source.convention
    write_json(
        args.folder / "aerie.json",
        {
            "run": args.run.name,
            "to": args.to,
            "samples": number,
            "tokens": source.tokens,
            **held,
            "verifier": origin["verifier"],
            "hidden_size": origin["hidden_size"],
            "convention": origin["key"],
        },
    )
    print(f"{number} samples, {source.tokens} tokens in {args.folder}")
    ids = " ".join(map(str, held["layer_ids"]))
    if args.to == "speculators":
        # Half a row more, so that truncation gives exactly the number of training samples.
        ratio = (source.train + 0.5) / number
        print(
            f"speculators train --data-path {args.folder} --on-missing raise --train-data-ratio "
            f"{ratio:.9f} --target-layer-ids {ids}"
        )
    else:
        print(f"layers by their output, as SpecForge counts: {ids}")
    if origin.get("last_state") == "supervised":
        print("`store.py import` does not take them: last states are left out, where no loss is")
    else:
        print(f"To take them into a store:\n  {import_command(args, held, origin['format'])}")


def import_command(args: argparse.Namespace, held: dict[str, Any], kept_as: str) -> str:
    """The command that takes in the files that `export_states` has written."""
    generation = read_optional(args.run / "config.json").get("generation", {})
    greedy = generation.get("mode") == "generate" and generation.get("temperature") == 0
    words = [".venv/bin/python", "scripts/store.py"]
    words += ["--store", args.store] * (args.store != Path("results/store"))
    words += ["import", "--run", args.run, "--layer-ids", *held["layer_ids"]]
    words += ["--counting", held["counting"], "--last-state", held["last_state"]]
    words += ["--answers", "greedy" if greedy else "other"]
    words += ["--format", kept_as] * (kept_as != "lossless")
    return shlex.join(map(str, [*words, args.folder]))


def import_states(args: argparse.Namespace) -> None:
    from aerie.maintenance import exchange

    verifier = cli.read_fingerprint(args.run / "verifier/fingerprint.json")
    stated = exchange.Stated.of(
        args.layer_ids, args.counting, verifier["num_layers"], args.last_state, args.answers
    )
    if not args.folder.is_dir():
        raise InputError(f"{args.folder}: no such folder")
    files, others = exchange.find_files(args.folder)
    if not files:
        raise InputError(
            f"{args.folder}: holds no hs_*.safetensors, *.pt, *.ckpt or *.ckpt.gz "
            f"({len(others)} other files)"
        )
    convention = Convention(
        verifier["fingerprint"],
        stated.layer_ids,
        verifier["hidden_size"],
        args.format,
        tokenizer=verifier["tokenizer"],
    )
    store = Store(args.store, convention)
    with JobProgress("import", len(files), "files") as bar:
        done = exchange.import_files(
            files,
            [str(p.relative_to(args.folder)) for p in files],
            store,
            Teacher(Path(verifier["path"])),
            stated,
            exchange.masks_of(args.run, args.folder),
            lambda done: exchange.write_import(args.store, args.folder, store, stated, done),
            bar.update,
        )
    print(
        f"{len(files)} files: {done.samples} samples with {done.tokens} tokens written to "
        f"{len(done.shards)} shards in {store.folder}, {done.present} were in the store already, "
        f"{len(done.refused)} refused"
        + (f"; {len(others)} files are of no known layout" if others else "")
    )
    if done.rounded:
        print(f"{done.rounded} were not in bf16 and were rounded to it")
    if stated.after_norm and done.samples:
        print("The last states are kept up to their length, which the final norm had taken away.")
    for reason, count in done.reasons.most_common():
        examples = [f"{n}: {e}" for n, e in done.refused.items() if e.startswith(reason)]
        print(f"  {count} refused: {reason}")
        for example in examples[:3]:
            print(f"    {example}")
    if done.shards:
        path = exchange.write_import(args.store, args.folder, store, stated, done)
        print(f"Named in {path}; delete that file when a run has copied them.")
    sys.exit(1 if done.refused else 0)


if __name__ == "__main__":
    cli.run(main)
