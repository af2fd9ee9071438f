"""Tiny verifiers, made in the test: real architectures, random weights, a trained tokenizer."""

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (
    "the sun rises over a quiet lake while children count apples and write short letters to "
    "friends about trains, boats and the long road home; every answer has a reason and a plan"
)

# config.json of moonshotai/Kimi-K2: 1 T parameters, 32 B of them active (its model card).
KIMI = {
    "text_config": {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8"},
    }
}

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# The check at the start of a run would cost each test its imports.
os.environ.setdefault("AERIE_UNCHECKED", "1")
# A shell that starts the tests in the background has SIGINT ignored, and jobs would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait for what comes in a moment, and on a busy machine some time later; `what`: said when it
    does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


class Clock:
    """Stands for the module `time` where a test says how much of it passes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_tokenizer(folder: Path) -> int:
    """A byte-level BPE tokenizer of about 400 tokens with a ChatML template; returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def make_verifier(folder: Path, seed: int = 0) -> Path:
    """A Llama of 6 layers and width 128 with random weights, tied embeddings, padded vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        # Wide enough apart that a greedy choice is not a near tie in bf16.
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory) -> Path:
    return make_verifier(tmp_path_factory.mktemp("verifier") / "tiny-llama")


TINY_ENGINE = {
    "dtype": "auto",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.5,
    "cpu_cache_gib": 1,
}


def run_python(code: str, timeout: float = 300, **variables: str) -> str:
    """Run code in a process of its own (an engine cannot be had twice in one); its output."""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def marked_processes(mark: str) -> list[psutil.Process]:
    """Processes with this value of the environment variable MARK, wherever they went."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get("MARK") == mark
                and process.status() != psutil.STATUS_ZOMBIE
                and process.cmdline()
            ):
                found.append(process)
    return found


def end_marked(mark: str) -> None:
    """Kill what is left with this mark; some of it may be ending by itself."""
    for process in marked_processes(mark):
        with contextlib.suppress(psutil.Error):
            process.kill()


class Project:
    """A copy of the workflow in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runner: subprocess.Popen | None = None
        folder.mkdir(parents=True)
        for name in ("Snakefile", "rules", "scripts", "profiles", "envs", "report", "resources"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / name)
        (folder / "config").mkdir()
        for name in ("config.yaml", "log_patterns.yaml", "known_versions.yaml"):
            shutil.copy2(ROOT / "config" / name, folder / "config")

    def snakemake(self, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "snakemake", "--cores", "2", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "PYTHONPATH": ""},
        )

    def dry_run(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of a dry run, by a process that has Snakemake imported."""
        if self.runner is None:
            self.runner = subprocess.Popen(
                [sys.executable, str(ROOT / "tests/workflow/dry_runner.py")],
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": ""},
            )
            atexit.register(self.close)
        self.runner.stdin.write(json.dumps(arguments) + "\n")
        self.runner.stdin.flush()
        answer = json.loads(self.runner.stdout.readline())
        return answer["status"], answer["output"]

    def close(self) -> None:
        """End the process that makes the dry runs."""
        if self.runner is not None:
            self.runner.stdin.close()
            self.runner.wait(timeout=60)
            self.runner = None

    def planned(self, *arguments: str) -> set[str]:
        """Rules that a dry run would run."""
        status, text = self.dry_run("--quiet", "reason", *arguments)
        assert status == 0, text
        if "Nothing to be done" in text:
            return set()
        table = text[text.index("Job stats:") :].splitlines()[3:]
        rules = set()
        for line in table:
            name = line.split()[0]
            if name == "total":
                break
            rules.add(name)
        return rules - {"all"}

    def read(self, name: str):
        return json.loads((self.folder / name).read_text())


@pytest.fixture
def project(tmp_path) -> Iterator[Project]:
    made = Project(tmp_path / "project")
    yield made
    made.close()
