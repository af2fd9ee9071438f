"""Answers from real vLLM servers, one of them killed in the middle, against the engine's own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from aerie.common.files import read_json, write_json_lines
from aerie.generation.answers import AnswerStore
from support.models import TINY_ENGINE, make_fingerprint
from support.paths import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

# In float32 a greedy choice does not depend on which requests share a batch.
ENGINE = {**TINY_ENGINE, "dtype": "float32", "max_num_seqs": 8}
PROMPTS = 240
MAX_TOKENS = 40


@contextlib.contextmanager
def serve(model: Path, log: Path, core: int):
    """A vLLM server on a free port: its base URL and its process, which leads a group.

    It computes on one core, or two servers would wait for each other's threads.
    """
    # Bound for as long as the server may want it: it comes late, and shares the port with us only.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = {
        "model": model,
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 160,
        "max-num-seqs": 8,
        "max-num-batched-tokens": 512,
    }
    command += [f"--{name}={value}" for name, value in options.items()]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--enforce-eager"],
            env={
                **os.environ,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield f"http://127.0.0.1:{port}/v1", process
    finally:
        kill(process)
        held.close()


def kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(met, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def answers_there(url: str) -> bool:
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/models").close()
    except OSError:
        return False
    return True


def test_two_servers_one_killed_give_the_engines_own_answers(tmp_path, tiny_verifier, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    records = [
        {
            "id": f"{i:032x}",
            "source": "test",
            "messages": [{"role": "user", "content": f"count {i} apples"}]
            + [{"role": "user", "content": "and boats"}] * (i % 8 == 0),
        }
        for i in range(PROMPTS)
    ]
    write_json_lines(tmp_path / "train.jsonl.zst", records)
    write_json_lines(tmp_path / "heldout.jsonl.zst", [])
    make_fingerprint(path=str(tiny_verifier)).write(tmp_path / "fingerprint.json")

    def start(name: str, **generation: object) -> subprocess.Popen:
        settings = {
            "generation": {"max_tokens": MAX_TOKENS, "capture": False, **generation},
            "samples": {"max_length": 160, "min_supervised_tokens": 1},
            "hidden_states": {},
            "engine": ENGINE,
            "verifier": {},
        }
        options = {
            "train": tmp_path / "train.jsonl.zst",
            "heldout": tmp_path / "heldout.jsonl.zst",
            "verifier": tmp_path / "fingerprint.json",
            "store": tmp_path / name,
            "output": tmp_path / f"{name}.json",
            "settings": json.dumps(settings),
        }
        command = [sys.executable, str(ROOT / "scripts" / "generate_responses.py")]
        command += [f"--{option}={value}" for option, value in options.items()]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(job: subprocess.Popen) -> str:
        try:
            output = job.communicate(timeout=400)[0]
        finally:
            job.kill()
        assert job.returncode == 0, output[-5000:]
        return output

    def answers(name: str) -> dict:
        return AnswerStore(tmp_path / name, read_json(tmp_path / f"{name}.json")["key"]).load()

    cores = (sorted(os.sched_getaffinity(0)) * 2)[:2]
    with contextlib.ExitStack() as opened:
        logs = [tmp_path / "first.log", tmp_path / "second.log"]
        (first, victim), (second, _) = [
            opened.enter_context(serve(tiny_verifier, log, core))
            for core, log in zip(cores, logs, strict=True)
        ]
        finish(start("own"))  # while the servers start
        for url, log in zip((first, second), logs, strict=True):
            wait_until(lambda url=url: answers_there(url), 300, f"{log} tells why")
        job = start("asked", endpoints=[first, second], endpoint_concurrency=4)
        opened.callback(job.kill)
        wait_until(
            lambda: any((tmp_path / "asked").rglob("*.jsonl.zst")), 120, "no answer was kept"
        )
        assert not (tmp_path / "asked.json").exists(), "finished before the server was killed"
        kill(victim)
        output = finish(job)
    assert f"{first} failed and is left out for now" in output and second not in output
    own, asked = answers("own"), answers("asked")
    assert read_json(tmp_path / "asked.json")["sampling"]["model"] == "tiny"
    assert asked.keys() == own.keys() == {record["id"] for record in records}
    for name, answer in asked.items():
        assert answer.samples == own[name].samples  # token ids, and where the answers are
        assert all(end > begin for s in answer.samples for begin, end in s.spans)
