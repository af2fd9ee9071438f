#!/usr/bin/env python3
"""Say what a run would do and need, before it does it: stages, bytes, memory, hours.

Starts no engine. What would run comes from Snakemake's dry run, what is kept from the store, the
hours from rates that earlier runs measured (results/*/benchmarks and manifests), else from a
machine of config/hardware.yaml.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from aerie import cli, plan
from aerie.config import Config, load_config
from aerie.files import InputError, read_json, read_json_lines

RESULTS = Path("results")
STAGES = (
    "import_verifier",
    "write_prompts",
    "collect_prompts",
    "generate_responses",
    "tokenize_samples",
    "map_vocabulary",
    "extract_hidden_states",
    "train_drafter",
    "measure_acceptance",
    "measure_speed",
    "render_report",
)
OUTPUTS = {
    "import_verifier": "verifier/fingerprint.json",
    "write_prompts": "prompts/self.json",
    "collect_prompts": "prompts/report.json",
    "generate_responses": "responses/manifest.json",
    "tokenize_samples": "samples/report.json",
    "map_vocabulary": "vocabulary/*/coverage.json",
    "extract_hidden_states": "hidden_states/lane-*.json",
    "train_drafter": "drafters/*/metrics.jsonl",
    "measure_acceptance": "evaluation/*/acceptance.json",
    "measure_speed": "evaluation/*/speed.json",
    "render_report": "report.html",
}
COUNT_SECONDS = 4.0
"""How long the sources are read to count the prompts; the rest of a larger corpus is estimated."""
LARGEST_ANSWERS = 200 * 2**20
"""Answers of more bytes than this are not read to see which prompts have one."""
ANSWER_SHARE = 0.8
"""Mean answer by `generation.max_tokens`, where no earlier run of this verifier shows it."""
FOUND_SECONDS = 5.0
"""What a job takes that finds all its work in the store."""
CHARACTERS_A_TOKEN = 4.0
TEMPLATE_TOKENS = 30
"""Tokens of a chat template around a turn, where no earlier run shows the length of a prompt."""


# What would run


def dry_run(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Jobs that Snakemake would run: rule → `jobs` (number), `reasons` (text → number)."""
    command = [sys.executable, "-m", "snakemake", "--dry-run", "--cores", "all", "--nocolor"]
    if files:
        command += ["--configfile", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode:
        raise InputError("snakemake --dry-run: " + text.strip().split("Building DAG")[-1][-3000:])
    planned: dict[str, dict[str, Any]] = {}
    for block in re.split(r"\n(?=(?:local)?(?:rule|checkpoint) \w+:\n)", text)[1:]:
        rule = re.match(r"(?:local)?\w+ (\w+):", block)[1]
        reason = re.search(r"^    reason: (.*)$", block, re.MULTILINE)
        entry = planned.setdefault(rule, {"jobs": 0, "reasons": Counter()})
        entry["jobs"] += 1
        entry["reasons"][short_reason(reason[1] if reason else "")] += 1
    planned.pop("all", None)
    return planned


def short_reason(text: str) -> str:
    """Snakemake's reason in few words: what changed first, a missing output, what ran before."""
    for words, short in (
        ("Params have changed", "settings changed"),
        ("Code has changed", "its command changed"),
        ("Set of input files has changed", "other input files"),
        ("Updated input files", "changed input"),
        ("Missing output files", "not made yet"),
        ("Input files updated by another job", "something before it runs"),
        ("Forced execution", "forced"),
    ):
        if words in text:
            return short
    return text or "unknown"


# What there is to do


def count_prompts(config: Config) -> dict[str, Any]:
    """The corpus as `collect_prompts` reads it: `ids`, `records`, mean `characters`, and whether
    all was read (`whole`) or the rest was estimated from the bytes left.

    Near duplicates and contaminated records are not taken out: the count is an upper bound.
    """
    from aerie.cleaning import characters, heldout_border, prompt_hash
    from aerie.corpus import Tally, printable, source_names
    from collect_prompts import MB, check_files, cleaned

    class Read:
        done = 0

        def update(self, done: int, *_: Any, **__: Any) -> None:
            self.done = done

    corpus, progress = config.corpus, Read()
    total = check_files(corpus.sources, RESULTS / config.run / "prompts")
    names = source_names(corpus.sources)
    tallies = {n: Tally(printable(s.path)) for n, s in zip(names, corpus.sources, strict=True)}
    ids, hashes, length, whole, start = [], [], 0, True, time.monotonic()
    for found in cleaned(corpus, config.generation.mode, tallies, None, {}, progress):
        ids.append(found.record["id"])
        hashes.append(prompt_hash(found.record))
        length += characters(found.record)
        if len(ids) % 500 == 0 and time.monotonic() - start > COUNT_SECONDS:
            whole = False
            break
    records = len(ids)
    if not whole and progress.done:
        records = max(records, round(records * (total / MB) / progress.done))
        records = min(records, corpus.limit or records)
    import array

    border, _ = heldout_border(array.array("Q", hashes), corpus.heldout_share) if ids else (0, None)
    return {
        "splits": {
            "train": [i for i, h in zip(ids, hashes, strict=True) if h >= border],
            "heldout": [i for i, h in zip(ids, hashes, strict=True) if h < border],
        },
        "records": records,
        "characters": length / max(1, len(ids)),
        "whole": whole,
    }


def sizes(config: Config, planned: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Records, samples and tokens, exact where the stages before are done, else estimated; `basis`
    says from what."""
    run = RESULTS / config.run
    if "tokenize_samples" not in planned:
        report = read_json(run / "samples/report.json")
        made = report["train"], report["heldout"]
        manifest = read_optional(run / "responses/manifest.json")
        return {
            "records": report["records_in"],
            "samples": sum(m["samples"] for m in made),
            "tokens": sum(m["tokens"] for m in made),
            "train_tokens": made[0]["tokens"],
            "generated_tokens": manifest.get("generated_tokens", 0),
            "basis": "counted in the samples",
        }
    if "collect_prompts" not in planned:
        splits = {
            name: [r["id"] for r in read_json_lines(run / f"prompts/{name}.jsonl.zst")]
            for name in ("train", "heldout")
        }
        records, basis, length = sum(map(len, splits.values())), "counted in the prompts", None
    else:
        counted = count_prompts(config)
        splits, records, length = counted["splits"], counted["records"], counted["characters"]
        basis = "counted in the sources" if counted["whole"] else "estimated from a part of them"
        if not counted["whole"]:
            splits = None
    records += config.self_prompts.number if "collect_prompts" in planned else 0
    means = mean_lengths(config, earlier, length)
    samples = round(records * means["samples"])
    tokens = min(round(samples * means["sample"]), samples * config.samples.max_length)
    return {
        "records": records,
        "samples": samples,
        "tokens": tokens,
        "train_tokens": round(tokens * (1 - config.corpus.heldout_share)),
        "generated_tokens": round(records * means["answer"]),
        "basis": f"prompts {basis}; lengths {means['basis']}",
        "splits": splits,
    }


def mean_lengths(
    config: Config, earlier: dict[str, Any], characters: float | None
) -> dict[str, Any]:
    """Mean tokens of an answer and of a sample, and samples a record."""
    generating = config.generation.mode == "generate"
    report, manifest = earlier.get("samples"), earlier.get("manifest")
    if report and bool(manifest) == generating:
        samples = sum(report[s]["samples"] for s in ("train", "heldout"))
        sample = sum(report[s]["tokens"] for s in ("train", "heldout")) / samples
        answer = 0.0
        if manifest:
            answer = manifest["generated_tokens"] / manifest["records"]
            old, new = manifest["sampling"]["max_tokens"], config.generation.max_tokens
            cut = manifest["truncated"] / max(1, manifest["answers"])
            # A shorter limit cuts in proportion; of a longer one, cut answers use about half.
            changed = answer * new / old if new < old else answer + cut * (new - old) / 2
            sample, answer = sample + changed - answer, changed
        return {
            "answer": answer,
            "sample": sample,
            "samples": samples / report["records_in"],
            "basis": f"of the run {earlier['name']}",
        }
    prompt = (characters or 400) / CHARACTERS_A_TOKEN + TEMPLATE_TOKENS
    answer = ANSWER_SHARE * config.generation.max_tokens if generating else 0.0
    return {
        "answer": answer,
        "sample": prompt + answer,
        "samples": 1.0,
        "basis": f"assumed: {CHARACTERS_A_TOKEN:.0f} characters a token, answers of "
        f"{ANSWER_SHARE:.0%} of max_tokens",
    }


def kept(config: Config, verifier: dict[str, Any] | None, counts: dict[str, Any]) -> dict[str, Any]:
    """What of the answers and shards the store holds already: `answers`, `shards`, `tokens` (in
    them), `all_shards`, and `later`: tokens whose states generation cannot capture."""
    from aerie.hidden_states import Convention, Store
    from aerie.verifier import resolve_layer_ids

    counts["shards"] = max(1, round(counts["samples"] / config.hidden_states.samples_per_shard))
    nothing = {"answers": 0, "shards": 0, "tokens": 0, "later": 0}
    if not verifier or verifier["source"] != config.verifier.source:
        return nothing
    layer_ids = resolve_layer_ids(config.hidden_states.layer_ids, verifier["num_layers"])
    store = Store(
        Path(config.store),
        Convention(
            verifier["fingerprint"],
            tuple(layer_ids),
            verifier["hidden_size"],
            config.hidden_states.format,
        ),
    )
    if "splits" not in counts:
        shards = read_json(RESULTS / config.run / "samples/shards.json")["shards"]
        here = [s for s in shards if store.has(s["id"])]
        tokens = sum(s["tokens"] for s in here)
        counts["shards"] = len(shards)
        return {
            "answers": counts["records"] if config.generation.mode == "generate" else 0,
            "shards": len(here),
            "tokens": tokens,
            "later": counts["tokens"] - tokens,
        }
    if counts["splits"] is None or config.generation.mode != "generate":
        return nothing
    return kept_groups(config, verifier, counts, store)


def kept_groups(
    config: Config, verifier: dict[str, Any], counts: dict[str, Any], store: Any
) -> dict[str, Any]:
    """`kept` for prompts that were counted: shards are known before an answer is."""
    from aerie.hidden_states import sample_key, shard_id
    from aerie.responses import AnswerStore, Sampling
    from aerie.samples import Dropped, group_by_shard, rows_of_answer

    generation, limits = config.generation, config.samples.model_dump()
    model = generation.endpoint_model if generation.endpoints else None
    sampling = Sampling(
        generation.temperature,
        generation.top_p,
        generation.max_tokens,
        config.samples.max_length,
        generation.seed,
        generation.first_turn_only,
        model,
    )
    answers = AnswerStore(Path(config.store), sampling.key(verifier["fingerprint"]))
    known: dict[str, Any] = {}
    if sum(p.stat().st_size for p in answers.folder.glob("*.zst")) <= LARGEST_ANSWERS:
        known = answers.load({i for ids in counts["splits"].values() for i in ids})
    found = {"answers": len(known), "shards": 0, "tokens": 0, "later": 0}
    mean = counts["tokens"] / max(1, counts["records"])
    counts["shards"] = 0
    for ids in counts["splits"].values():
        groups = group_by_shard([{"id": i} for i in ids], config.hidden_states.samples_per_shard)
        counts["shards"] += len(groups)
        for group in groups:
            have = [known[ids[p]] for p in group if ids[p] in known]
            rows = []
            for answer in have:
                try:
                    rows += rows_of_answer(
                        {"id": answer["id"], "source": ""}, "train", answer, limits
                    )
                except Dropped:
                    continue
            tokens = sum(len(r.input_ids) for r in rows)
            whole = len(have) == len(group)
            if whole and rows and store.has(shard_id(sample_key(r.input_ids) for r in rows)):
                found["shards"] += 1
                found["tokens"] += tokens
            elif have or not generation.capture or generation.endpoints:
                # States of answers that were given before are copied or extracted.
                found["later"] += round(mean * len(group))
    return found


# The verifier


def find_verifier(config: Config) -> tuple[dict[str, Any] | None, plan.Shape | None, float]:
    """Fingerprint (None before it is imported), shape and bytes of weights of the verifier.

    The shape is read from its config.json, or from the GGUF file that it will be made of; None for
    a Hugging Face id that is not in the hub's cache.
    """
    source = config.verifier.source
    fingerprint = read_optional(RESULTS / config.run / "verifier/fingerprint.json")
    fingerprint = fingerprint if fingerprint.get("source") == source else None
    if not fingerprint:
        # Another run may have imported it.
        for path in sorted(RESULTS.glob("*/verifier/fingerprint.json")):
            found = read_optional(path)
            if found.get("source") == source:
                fingerprint = found
    folder = Path(fingerprint["path"]) if fingerprint and "path" in fingerprint else Path(source)
    if source.startswith("package:") and not (folder / "config.json").is_file():
        values = gguf_config(source.removeprefix("package:"))
    elif (folder / "config.json").is_file():
        values = read_json(folder / "config.json")
    else:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(source, "config.json") if "/" in source else None
        if not isinstance(path, str):
            return fingerprint, None, 0.0
        folder = Path(path).parent
        values = read_json(path)
    shape = plan.read_shape(values)
    weights = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    return fingerprint, shape, weights or plan.parameters(shape)[0] * shape.weight_bytes_each


def gguf_config(package: str) -> dict[str, Any]:
    """The keys of a config.json, of the GGUF file in a Python package."""
    from gguf import GGUFReader

    from aerie.verifier import packaged_gguf

    fields = GGUFReader(packaged_gguf(package)).fields

    def value(name: str, default: Any = None) -> Any:
        field = fields.get(name)
        return field.contents() if field else default

    kind = value("general.architecture")
    heads = value(f"{kind}.attention.head_count")
    return {
        "hidden_size": value(f"{kind}.embedding_length"),
        "num_hidden_layers": value(f"{kind}.block_count"),
        "intermediate_size": value(f"{kind}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": value(f"{kind}.attention.head_count_kv", heads),
        "vocab_size": len(fields["tokenizer.ggml.tokens"].data),
        "max_position_embeddings": value(f"{kind}.context_length"),
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def earlier_runs(verifier: dict[str, Any] | None, run: str) -> list[Path]:
    """Runs with this verifier, this one last, whose rates and lengths serve."""
    found = []
    for path in sorted(RESULTS.glob("*/verifier/fingerprint.json")):
        same = verifier and read_optional(path).get("fingerprint") == verifier.get("fingerprint")
        if same and path.parent.parent.name != "store":
            found.append(path.parent.parent)
    return sorted(found, key=lambda p: p.name == run)


def read_optional(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except InputError:
        return {}
    return found if isinstance(found, dict) else {}


# The plan


def choose_hardware(path: Path, name: str | None, gpus: bool) -> plan.Hardware:
    """The machine by that name, or the first with or without GPUs, as the configuration asks."""
    machines = yaml.safe_load(path.read_text(encoding="utf-8"))
    if name is None:
        name = next(n for n, m in machines.items() if bool(m["gpus"]) == gpus)
    if name not in machines:
        raise InputError(f"{path}: holds no machine {name!r}; there are {', '.join(machines)}")
    try:
        return plan.Hardware(name, **machines[name])
    except TypeError as error:
        raise InputError(f"{path}: {name}: {error}") from None


def make_plan(files: list[Path], hardware_file: Path, hardware_name: str | None) -> dict[str, Any]:
    """The whole plan, as `--json` prints it; sizes in bytes, times in seconds."""
    config = load_config(cli.read_config(files))
    planned = dry_run(files)
    verifier, shape, weights = find_verifier(config)
    on_gpus = any(d.gpus for d in config.drafters.values())
    on_gpus = on_gpus or config.engine.tensor_parallel_size > 1
    hardware = choose_hardware(hardware_file, hardware_name, on_gpus)
    runs = earlier_runs(verifier, config.run)
    rates: dict[str, plan.Rate] = {}
    earlier: dict[str, Any] = {}
    for run in runs:
        rates |= plan.measured_rates(run, shape)
        report = read_optional(run / "samples/report.json")
        if report.get("train"):
            manifest = read_optional(run / "responses/manifest.json")
            earlier = {"samples": report, "manifest": manifest, "name": run.name}
    counts = sizes(config, planned, earlier)
    held = kept(config, verifier, counts)
    counts.pop("splits", None)
    result: dict[str, Any] = {
        "run": config.run,
        "counts": counts,
        "kept": held,
        "hardware": asdict(hardware),
        "stages": [],
        "warnings": [],
    }
    if shape is None:
        result["warnings"].append(
            f"verifier.source {config.verifier.source}: not on this machine, so its sizes are not "
            "known; fetch its config.json to have bytes, memory and hours"
        )
    else:
        describe_model(result, config, shape, weights, hardware)
        describe_bytes(result, config, shape, trains="train_drafter" in planned)
    work = work_of(result, config, shape, weights, hardware)
    for stage in STAGES:
        jobs = planned.get(stage, {"jobs": 0, "reasons": {}})
        outputs = sorted((RESULTS / config.run).glob(OUTPUTS[stage]))
        if not jobs["jobs"] and not outputs:
            continue
        units, unit, assumed, devices = work.get(stage, (0, "", 0.0, 0))
        rate = rates.get(stage)
        seconds = rate.seconds(units or 1) if rate and (units or not unit) else assumed
        if unit and not units:
            seconds = FOUND_SECONDS
        if not jobs["jobs"]:
            seconds = 0.0
        result["stages"].append(
            {
                "stage": stage,
                "jobs": jobs["jobs"],
                "reasons": dict(jobs["reasons"]),
                "present": len(outputs),
                "units": units,
                "unit": unit,
                "seconds": seconds,
                "gpu_hours": seconds * devices / 3600,
                "rate": f"measured in {rate.source}" if rate else f"assumed: {hardware.name}",
            }
        )
    result["seconds"] = sum(s["seconds"] for s in result["stages"])
    result["gpu_hours"] = sum(s["gpu_hours"] for s in result["stages"])
    return result


def describe_model(result, config, shape, weights, hardware) -> None:
    """Adds `verifier`, `drafters` and `memory`, with warnings where something does not fit."""
    aux = len(config.hidden_states.layer_ids or (1, 1, 1))
    total, active = plan.parameters(shape)
    engine = config.engine
    gpus = engine.tensor_parallel_size
    memory = plan.engine_memory(
        shape,
        weights,
        gpus,
        aux + 1 if config.generation.capture else 0,
        config.samples.max_length,
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
    )
    result["verifier"] = {
        "source": config.verifier.source,
        "parameters": total,
        "active_parameters": active,
        "weights": weights,
        "lm_head": 2 * shape.vocab * shape.hidden,
        "vocabulary": shape.vocab,
        "aux_states": aux,
        "memory": memory,
    }
    room = hardware.gpu_memory_gib * plan.GIB * engine.gpu_memory_utilization
    if hardware.gpus:
        if memory["least"] > room:
            result["warnings"].append(
                f"the verifier does not fit: {memory['least'] / plan.GIB:.0f} GiB on each of "
                f"{gpus} GPUs for its weights, a step and one sequence; {hardware.name} has "
                f"{room / plan.GIB:.0f} GiB (gpu_memory_utilization "
                f"{engine.gpu_memory_utilization}); raise engine.tensor_parallel_size"
            )
        if gpus > hardware.gpus:
            result["warnings"].append(
                f"engine.tensor_parallel_size {gpus}: {hardware.name} has {hardware.gpus} GPUs"
            )
    result["drafters"] = {}
    for name, drafter in config.drafters.items():
        settings = drafter.model_dump()
        sizes_of = plan.drafter_parameters(shape, settings, aux)
        bytes_each = 2 if drafter.gpus else 4
        peak = plan.training_memory(shape, settings, aux, bytes_each)
        result["drafters"][name] = {
            "vocabulary": sizes_of["vocabulary"],
            "head": 2 * sizes_of["head"],
            "trained_parameters": sizes_of["trained"],
            "model": plan.drafter_bytes(sizes_of),
            "checkpoint": plan.checkpoint_bytes(sizes_of, drafter.optimizer),
            "memory": peak,
        }
        limit = hardware.gpu_memory_gib * plan.GIB if drafter.gpus else main_memory()
        if limit and peak["peak"] > limit:
            result["warnings"].append(
                f"training {name} does not fit: about {peak['peak'] / plan.GIB:.0f} GiB of "
                f"{limit / plan.GIB:.0f} GiB; the logits take {peak['logits'] / plan.GIB:.0f}: "
                "lower sequence_length, vocabulary or ttt_steps"
            )


def main_memory() -> int:
    import os

    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe_bytes(result, config, shape, trains: bool) -> None:
    """Adds `bytes`: what the run will write, and a warning when it is more than is free.

    `needed`: of the states what is new, and with `trains` drafters and checkpoints.
    """
    counts, held = result["counts"], result["kept"]
    ids = result["verifier"]["aux_states"] + 1
    raw = plan.state_bytes(counts["tokens"], ids, shape.hidden)
    share = 1.0 if config.hidden_states.format == "raw" else stored_share(config)
    new = raw * share * (1 - held["tokens"] / max(1, counts["tokens"]))
    in_flight = min(
        counts["samples"],
        2 * config.engine.max_num_seqs + 2 * config.hidden_states.samples_per_shard,
    )
    mean = counts["tokens"] / max(1, counts["samples"])
    drafters = result["drafters"].values()
    found = {
        "states_raw": raw,
        "states_stored": round(raw * share),
        "states_new": round(new),
        "staging": round(plan.state_bytes(1, ids, shape.hidden) * mean * in_flight),
        # The store's copy and the run's; the old checkpoint goes when the new one is whole.
        "drafters": sum(2 * d["model"] for d in drafters),
        "checkpoints": max(2 * d["checkpoint"] for d in drafters),
    }
    place = Path(config.store)
    while not place.is_dir():
        place = place.parent
    found["free"] = shutil.disk_usage(place).free
    shm = Path("/dev/shm")
    found["staging_free"] = shutil.disk_usage(shm).free if shm.is_dir() else found["free"]
    training = found["drafters"] + found["checkpoints"]
    found["needed"] = found["states_new"] + (training if trains else 0)
    result["bytes"] = found
    for what, need, free in (
        (config.store, found["needed"], found["free"]),
        ("staging in /dev/shm", found["staging"], found["staging_free"]),
    ):
        if need > free:
            result["warnings"].append(
                f"{what}: {need / plan.GIB:.1f} GiB are needed, {free / plan.GIB:.1f} GiB are free"
            )


def stored_share(config: Config) -> float:
    """Stored by raw bytes, as the lanes of this run or another show it."""
    for path in [
        *RESULTS.glob(f"{config.run}/hidden_states/lane-*.json"),
        *RESULTS.glob("*/hidden_states/lane-*.json"),
    ]:
        lane = read_optional(path)
        if lane.get("raw_bytes") and lane["convention"]["format"] == "lossless":
            return lane["bytes"] / lane["raw_bytes"]
    return plan.LOSSLESS_SHARE


def work_of(result, config, shape, weights, hardware) -> dict[str, tuple[float, str, float, int]]:
    """Stage → units to do, their name, seconds by the hardware table, GPUs used at a time."""
    counts, held = result["counts"], result["kept"]
    records = counts["records"]
    work: dict[str, tuple[float, str, float, int]] = {
        "import_verifier": (0, "", 30.0, 0),
        "collect_prompts": (records, "records", 2 + records / 5000, 0),
        "tokenize_samples": (records, "records", 10 + records / 500, 0),
        "map_vocabulary": (0, "", 10.0, 0),
        "render_report": (0, "", 10.0, 0),
    }
    if shape is None:
        return work
    gpus = config.engine.tensor_parallel_size if hardware.gpus else 0
    devices = max(1, gpus)
    active = result["verifier"]["active_parameters"]
    start = plan.start_seconds(hardware, weights)
    share = result["bytes"]["states_stored"] / max(1, counts["tokens"])

    def engine(prompt: float, new: float, written: float) -> float:
        operations = plan.generation_operations(active, prompt, new)
        busy = plan.engine_seconds(hardware, devices, operations, written)
        return start + busy if prompt or new else 0.0

    missing = max(0.0, 1 - held["answers"] / max(1, records))
    if config.generation.mode == "generate":
        new = counts["generated_tokens"] * missing
        prompts = max(0, counts["tokens"] - counts["generated_tokens"]) * missing
        captures = config.generation.capture and not config.generation.endpoints
        written = (prompts + new) * share if captures else 0.0
        seconds = engine(prompts, new, written)
        work["generate_responses"] = (new, "new tokens", seconds, gpus)
        left = held["later"] if captures else counts["tokens"] - held["tokens"]
    else:
        left = counts["tokens"] - held["tokens"]
    work["extract_hidden_states"] = (left, "tokens", engine(left, 0, left * share), gpus)
    billions = seconds = 0.0
    training_gpus = 0
    for name, drafter in config.drafters.items():
        sizes_of = plan.drafter_parameters(
            shape, drafter.model_dump(), result["verifier"]["aux_states"]
        )
        tokens = counts["train_tokens"] * drafter.epochs
        operations = plan.training_operations(sizes_of, drafter.ttt_steps, tokens)
        billions += operations / 1e9
        read = drafter.epochs * counts["train_tokens"] * share
        seconds += plan.training_seconds(hardware, max(1, drafter.gpus), operations, read)
        training_gpus = max(training_gpus, drafter.gpus)
        result["drafters"][name]["tokens"] = tokens
    work["train_drafter"] = (billions, "10⁹ operations", seconds, training_gpus)
    evaluation, names = config.evaluation, len(config.drafters)
    sets = 1 + len(evaluation.prompt_sets)
    answers = sets * evaluation.max_prompts * evaluation.max_tokens * names * ANSWER_SHARE
    mean = counts["tokens"] / max(1, counts["samples"])
    prompts = sets * evaluation.max_prompts * mean * names
    work["measure_acceptance"] = (answers, "new tokens", engine(prompts, answers, 0), gpus)
    timed = 2 * evaluation.speed_prompts * evaluation.max_tokens * ANSWER_SHARE
    timed *= names * len(evaluation.concurrencies)
    # One request at a time: reading all active weights for each token is what takes long.
    alone = 2 * names * start + timed * max(
        active * shape.weight_bytes_each / (3e12 if gpus else 1.5e10) / devices,
        2 * active / (hardware.tflops * 1e12),
    )
    work["measure_speed"] = (timed, "new tokens", alone, gpus)
    return work


def main() -> None:
    parser = cli.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", type=Path, nargs="*", help="laid over config/config.yaml in turn")
    parser.add_argument("--json", action="store_true", help="for machines: bytes and seconds")
    parser.add_argument("--hardware", help="a machine of the table (default: the first that fits)")
    parser.add_argument("--hardware-file", type=Path, default=Path("config/hardware.yaml"))
    args = parser.parse_args()
    result = make_plan(args.config, args.hardware_file, args.hardware)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        from aerie.plan_text import show

        show(result)


if __name__ == "__main__":
    cli.run(main)
