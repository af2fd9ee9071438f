"""What a run would do and need, before it does it: stages, bytes, memory, hours.

`run`: its folder, which need not be there, beside those of other runs. `planned`: rule → `jobs`
(number) and `reasons` (text → number) of what would run.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from aerie.common.errors import InputError
from aerie.common.files import free_bytes, read_json, read_json_lines, read_optional
from aerie.common.machine import main_memory
from aerie.common.stages import OUTPUTS, STAGES
from aerie.config import Config
from aerie.corpus.cleaning import characters, cleaned, heldout_border, prompt_hash
from aerie.corpus.layouts import check_files, new_tallies
from aerie.corpus.reading import Meter
from aerie.engine.staging import MEMORY
from aerie.planning import costs
from aerie.planning.costs import GIB
from aerie.verifier.checkpoint import gguf_config
from aerie.verifier.compatibility import resolve_layer_ids
from aerie.verifier.fingerprint import FINGERPRINT, find_fingerprint

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


# What there is to do


def count_prompts(config: Config, run: Path) -> dict[str, Any]:
    """The corpus as `collect_prompts` reads it: ids by side (`splits`), `records`, mean
    `characters`, and whether all was read (`whole`) or the rest was estimated from the bytes left.

    Near duplicates and contaminated records are not taken out: the count is an upper bound.
    """
    corpus, meter = config.corpus, Meter()
    total = check_files(corpus.sources, run / "prompts")
    tallies = new_tallies(corpus.sources)
    ids, hashes, length, whole, start = [], [], 0, True, time.monotonic()
    for found in cleaned(corpus, config.generation.mode, tallies, meter):
        ids.append(found.record["id"])
        hashes.append(prompt_hash(found.record))
        length += characters(found.record)
        if len(ids) % 500 == 0 and time.monotonic() - start > COUNT_SECONDS:
            whole = False
            break
    records = len(ids)
    if not whole and meter.done:
        records = max(records, round(records * total / meter.done))
        records = min(records, corpus.limit or records)
    border, _ = heldout_border(hashes, corpus.heldout_share)
    return {
        "splits": {
            "train": [i for i, h in zip(ids, hashes, strict=True) if h >= border],
            "heldout": [i for i, h in zip(ids, hashes, strict=True) if h < border],
        },
        "records": records,
        "characters": length / max(1, len(ids)),
        "whole": whole,
    }


def sizes(
    config: Config, run: Path, planned: dict[str, Any], earlier: dict[str, Any]
) -> dict[str, Any]:
    """Records, samples and tokens, exact where the stages before are done, else estimated; `basis`
    says from what."""
    if "tokenize_samples" not in planned:
        report = read_json(run / "samples/report.json")
        made = report["train"], report["heldout"]
        manifest = read_optional(run / "responses/manifest.json")
        records = report["records_in"]
        heldout = read_optional(run / "prompts/report.json").get("heldout")
        return {
            "records": records,
            "heldout": round(records * config.corpus.heldout_share) if heldout is None else heldout,
            "samples": sum(m["samples"] for m in made),
            "tokens": sum(m["tokens"] for m in made),
            "train_tokens": made[0]["tokens"],
            "supervised_tokens": sum(m.get("supervised_tokens", m["tokens"]) for m in made),
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
        counted = count_prompts(config, run)
        splits = counted["splits"] if counted["whole"] else None
        records, length = counted["records"], counted["characters"]
        basis = "counted in the sources" if splits else "estimated from a part of them"
    share = config.corpus.heldout_share
    heldout = len(splits["heldout"]) if splits else round(records * share)
    written = config.self_prompts.number if "collect_prompts" in planned else 0
    records, heldout = records + written, heldout + round(written * share)
    means = mean_lengths(config, earlier, length)
    samples = round(records * means["samples"])
    tokens = min(round(samples * means["sample"]), samples * config.samples.max_length)
    generated = round(records * means["answer"])
    return {
        "records": records,
        "heldout": heldout,
        "samples": samples,
        "tokens": tokens,
        "train_tokens": round(tokens * (1 - share)),
        # In conversations with answers of their own it is not known before they are tokenized.
        "supervised_tokens": min(tokens, generated) or tokens,
        "generated_tokens": generated,
        "basis": f"prompts {basis}; lengths {means['basis']}",
        "splits": splits,
    }


def mean_lengths(config: Config, earlier: dict[str, Any], length: float | None) -> dict[str, Any]:
    """Mean tokens of an answer and of a sample, and samples a record; `length`: its characters."""
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
    prompt = (length or 400) / CHARACTERS_A_TOKEN + TEMPLATE_TOKENS
    answer = ANSWER_SHARE * config.generation.max_tokens if generating else 0.0
    return {
        "answer": answer,
        "sample": prompt + answer,
        "samples": 1.0,
        "basis": f"assumed: {CHARACTERS_A_TOKEN:.0f} characters a token, answers of "
        f"{ANSWER_SHARE:.0%} of max_tokens",
    }


def kept(
    config: Config, run: Path, verifier: dict[str, Any] | None, counts: dict[str, Any]
) -> dict[str, Any]:
    """What of the answers and shards the store holds already: `answers`, `shards`, `tokens` (in
    them), and `later`: tokens whose states generation cannot capture. Adds `shards` to `counts`."""
    from aerie.extraction.lane import is_done
    from aerie.states.shard import Convention, Store

    counts["shards"] = max(1, round(counts["samples"] / config.hidden_states.samples_per_shard))
    nothing = {"answers": 0, "shards": 0, "tokens": 0, "later": 0}
    if not verifier or verifier["source"] != config.verifier.source:
        return nothing
    convention = Convention(
        verifier["fingerprint"],
        tuple(resolve_layer_ids(config.hidden_states.layer_ids, verifier["num_layers"])),
        verifier["hidden_size"],
        config.hidden_states.format,
        config.hidden_states.last_state,
    )
    store = Store(Path(config.store), convention)
    if "splits" not in counts:
        shards = read_json(run / "samples/shards.json")["shards"]
        here = [s for s in shards if is_done(store, s["id"])]
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
    from aerie.extraction.lane import is_done
    from aerie.generation.answers import AnswerStore, Sampling
    from aerie.samples.tokenize import Dropped, describe_shard, group_by_shard, rows_of_answer

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
    for split, ids in counts["splits"].items():
        groups = group_by_shard([{"id": i} for i in ids], config.hidden_states.samples_per_shard)
        counts["shards"] += len(groups)
        for group in groups:
            have = [known[ids[p]] for p in group if ids[p] in known]
            rows = []
            for answer in have:
                try:
                    record = {"id": answer["id"], "source": ""}
                    rows += rows_of_answer(record, split, answer, limits)
                except Dropped:
                    continue
            shard = describe_shard(split, rows, config.hidden_states.last_state)
            tokens, whole = shard["tokens"], len(have) == len(group)
            if whole and rows and is_done(store, shard["id"]):
                found["shards"] += 1
                found["tokens"] += tokens
            elif have or not generation.capture or generation.endpoints:
                # States of answers that were given before are copied or extracted.
                found["later"] += round(mean * len(group))
    return found


# The verifier


def find_shape(
    config: Config, run: Path
) -> tuple[dict[str, Any] | None, costs.Shape | None, float]:
    """Fingerprint (None before it is imported), shape and bytes of weights of the verifier.

    The shape is read from its config.json, or from the GGUF file that it will be made of; None for
    a Hugging Face id that is not in the hub's cache.
    """
    source = config.verifier.source
    known = find_fingerprint(source, run.parent, run.name)
    fingerprint = known.as_json() if known else None
    folder = Path((fingerprint or {}).get("path", source))
    if (folder / "config.json").is_file():
        values = read_json(folder / "config.json")
    elif source.startswith("package:"):
        values = gguf_config(source.removeprefix("package:"))
    else:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(source, "config.json") if "/" in source else None
        if not isinstance(path, str):
            return fingerprint, None, 0.0
        folder = Path(path).parent
        values = read_json(path)
    shape = costs.read_shape(values)
    weights = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    return fingerprint, shape, weights or costs.parameters(shape)[0] * shape.weight_bytes_each


def earlier_runs(verifier: dict[str, Any] | None, run: Path) -> list[Path]:
    """Runs with this verifier, this one last, whose rates and lengths serve."""
    found = []
    for path in sorted(run.parent.glob(f"*/{FINGERPRINT}")):
        if verifier and read_optional(path).get("fingerprint") == verifier.get("fingerprint"):
            found.append(path.parent.parent)
    return sorted(found, key=lambda p: p == run)


# The plan


def choose_hardware(path: Path, name: str | None, config: Config) -> costs.Hardware:
    """The machine by that name, or the first with or without GPUs, as the configuration asks."""
    machines = yaml.safe_load(path.read_text(encoding="utf-8"))
    if name is None:
        gpus = config.engine.tensor_parallel_size > 1
        gpus = gpus or any(d.gpus for d in config.drafters.values())
        name = next(n for n, m in machines.items() if bool(m["gpus"]) == gpus)
    if name not in machines:
        raise InputError(f"{path}: holds no machine {name!r}; there are {', '.join(machines)}")
    try:
        return costs.Hardware(name, **machines[name])
    except TypeError as error:
        raise InputError(f"{path}: {name}: {error}") from None


def make_plan(
    config: Config, run: Path, planned: dict[str, Any], hardware: costs.Hardware
) -> dict[str, Any]:
    """The whole plan, as JSON holds it; sizes in bytes, times in seconds."""
    verifier, shape, weights = find_shape(config, run)
    rates: dict[str, costs.Rate] = {}
    earlier: dict[str, Any] = {}
    for other in earlier_runs(verifier, run):
        rates |= costs.measured_rates(other, shape)
        report = read_optional(other / "samples/report.json")
        if report.get("train"):
            manifest = read_optional(other / "responses/manifest.json")
            earlier = {"samples": report, "manifest": manifest, "name": other.name}
    counts = sizes(config, run, planned, earlier)
    held = kept(config, run, verifier, counts)
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
        describe_bytes(result, config, run, shape, trains="train_drafter" in planned)
    work = work_of(result, config, shape, weights, hardware)
    for stage in STAGES:
        jobs = planned.get(stage, {"jobs": 0, "reasons": {}})
        outputs = sorted(run.glob(OUTPUTS[stage].format(part="*")))
        if not jobs["jobs"] and not outputs:
            continue
        units, unit, assumed, devices = work.get(stage, (0, "", 0.0, 0))
        rate = rates.get(stage)
        seconds = rate.seconds(units or 1) if rate else assumed
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
    if "one_pass" in result and (rate := rates.get("extract_hidden_states")):
        result["one_pass"]["seconds"] = rate.seconds(result["one_pass"]["tokens"])
    result["seconds"] = sum(s["seconds"] for s in result["stages"])
    result["gpu_hours"] = sum(s["gpu_hours"] for s in result["stages"])
    return result


def describe_model(result, config, shape, weights, hardware) -> None:
    """Adds `verifier`, `drafters` and `memory`, with warnings where something does not fit."""
    aux = len(config.hidden_states.layer_ids or (1, 1, 1))
    total, active = costs.parameters(shape)
    engine = config.engine
    gpus = engine.tensor_parallel_size
    memory = costs.engine_memory(
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
    room = hardware.gpu_memory_gib * GIB * engine.gpu_memory_utilization
    if hardware.gpus:
        if memory["least"] > room:
            result["warnings"].append(
                f"the verifier does not fit: {memory['least'] / GIB:.0f} GiB on each of "
                f"{gpus} GPUs for its weights, a step and one sequence; {hardware.name} has "
                f"{room / GIB:.0f} GiB (gpu_memory_utilization "
                f"{engine.gpu_memory_utilization}); raise engine.tensor_parallel_size"
            )
        if gpus > hardware.gpus:
            result["warnings"].append(
                f"engine.tensor_parallel_size {gpus}: {hardware.name} has {hardware.gpus} GPUs"
            )
    result["drafters"] = {}
    for name, drafter in config.drafters.items():
        settings = drafter.model_dump()
        sizes_of = costs.drafter_parameters(shape, settings, aux)
        bytes_each = 2 if drafter.gpus else 4
        peak = costs.training_memory(shape, settings, aux, bytes_each)
        result["drafters"][name] = {
            "vocabulary": sizes_of["vocabulary"],
            "head": 2 * sizes_of["head"],
            "trained_parameters": sizes_of["trained"],
            "model": costs.drafter_bytes(sizes_of),
            "checkpoint": costs.checkpoint_bytes(sizes_of, drafter.optimizer),
            "memory": peak,
        }
        limit = hardware.gpu_memory_gib * GIB if drafter.gpus else main_memory()
        if limit and peak["peak"] > limit:
            result["warnings"].append(
                f"training {name} does not fit: about {peak['peak'] / GIB:.0f} GiB of "
                f"{limit / GIB:.0f} GiB; the logits take {peak['logits'] / GIB:.0f}: "
                "lower sequence_length, vocabulary or ttt_steps"
            )


def describe_bytes(result, config, run, shape, trains: bool) -> None:
    """Adds `bytes`: what the run will write, and a warning when it is more than is free.

    `needed`: of the states what is new, and with `trains` drafters and checkpoints.
    """
    counts, held = result["counts"], result["kept"]
    ids = result["verifier"]["aux_states"] + 1
    raw = costs.state_bytes(counts["tokens"], ids, shape.hidden)
    omitted = 0
    if config.hidden_states.last_state == "supervised":
        without = counts["tokens"] - counts["supervised_tokens"]
        omitted = costs.state_bytes(without, 1, shape.hidden)
    share = 1.0 if config.hidden_states.format == "raw" else stored_share(run)
    stored = (raw - omitted) * share
    new = stored * (1 - held["tokens"] / max(1, counts["tokens"]))
    in_flight = min(
        counts["samples"],
        2 * config.engine.max_num_seqs + 2 * config.hidden_states.samples_per_shard,
    )
    mean = counts["tokens"] / max(1, counts["samples"])
    drafters = result["drafters"].values()
    found = {
        "states_raw": raw,
        "states_omitted": omitted,
        "states_stored": round(stored),
        "states_new": round(new),
        "staging": round(costs.state_bytes(1, ids, shape.hidden) * mean * in_flight),
        # The store's copy and the run's; the old checkpoint goes when the new one is whole.
        "drafters": sum(2 * d["model"] for d in drafters),
        "checkpoints": max(2 * d["checkpoint"] for d in drafters),
    }
    found["free"] = free_bytes(Path(config.store))
    found["staging_free"] = free_bytes(MEMORY) if MEMORY.is_dir() else found["free"]
    training = found["drafters"] + found["checkpoints"]
    found["needed"] = found["states_new"] + (training if trains else 0)
    result["bytes"] = found
    for what, need, free in (
        (config.store, found["needed"], found["free"]),
        (f"staging in {MEMORY}", found["staging"], found["staging_free"]),
    ):
        if need > free:
            result["warnings"].append(
                f"{what}: {need / GIB:.1f} GiB are needed, {free / GIB:.1f} GiB are free"
            )


def stored_share(run: Path) -> float:
    """Stored bytes by raw bytes of the states that are stored, as the lanes of this run or another
    show it."""
    for path in [
        *run.glob("hidden_states/lane-*.json"),
        *run.parent.glob("*/hidden_states/lane-*.json"),
    ]:
        lane = read_optional(path)
        if lane.get("raw_bytes") and lane["convention"]["format"] == "lossless":
            return lane["bytes"] / (lane["raw_bytes"] - lane.get("omitted_bytes", 0))
    return costs.LOSSLESS_SHARE


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
    start = costs.start_seconds(hardware, weights)
    share = result["bytes"]["states_stored"] / max(1, counts["tokens"])

    def engine(prompt: float, new: float, written: float) -> float:
        operations = costs.generation_operations(active, prompt, new)
        busy = costs.engine_seconds(hardware, devices, operations, written)
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
        if captures and new:
            spared = max(0, counts["tokens"] - held["tokens"] - left)
            seconds = engine(spared, 0, spared * share) - (start if left else 0)
            result["one_pass"] = {"tokens": spared, "seconds": seconds}
    else:
        left = counts["tokens"] - held["tokens"]
    work["extract_hidden_states"] = (left, "tokens", engine(left, 0, left * share), gpus)
    billions = seconds = 0.0
    training_gpus = 0
    for name, drafter in config.drafters.items():
        sizes_of = costs.drafter_parameters(
            shape, drafter.model_dump(), result["verifier"]["aux_states"]
        )
        tokens = counts["train_tokens"] * drafter.epochs
        operations = costs.training_operations(sizes_of, drafter.ttt_steps, tokens)
        billions += operations / 1e9
        seconds += costs.training_seconds(
            hardware, max(1, drafter.gpus), operations, tokens * share
        )
        training_gpus = max(training_gpus, drafter.gpus)
        result["drafters"][name]["tokens"] = tokens
    work["train_drafter"] = (billions, "10⁹ operations", seconds, training_gpus)
    evaluation, names = config.evaluation, len(config.drafters)
    asked = measured_prompts(config, counts["heldout"])
    answers = asked * evaluation.max_tokens * names * ANSWER_SHARE
    mean = counts["tokens"] / max(1, counts["samples"])
    prompts = asked * mean * names
    work["measure_acceptance"] = (answers, "new tokens", engine(prompts, answers, 0), gpus)
    timed = 2 * min(evaluation.speed_prompts, counts["heldout"])
    timed *= evaluation.max_tokens * ANSWER_SHARE
    timed *= names * len(evaluation.concurrencies)
    # One request at a time: reading all active weights for each token is what takes long.
    alone = 2 * names * start + timed * max(
        active * shape.weight_bytes_each / (3e12 if gpus else 1.5e10) / devices,
        2 * active / (hardware.tflops * 1e12),
    )
    work["measure_speed"] = (timed, "new tokens", alone, gpus)
    return work


def measured_prompts(config: Config, heldout: int) -> int:
    """Prompts that acceptance is measured on, of all sets together."""
    from aerie.corpus.prompt_sets import read_prompt_file

    sets = [len(read_prompt_file(Path(p))) for p in config.evaluation.prompt_sets.values()]
    return sum(min(number, config.evaluation.max_prompts) for number in [heldout, *sets])
