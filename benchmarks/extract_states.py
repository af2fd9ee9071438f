#!/usr/bin/env python3
"""Extraction against the same engine with states discarded, and against upstream's program.

Ours: checked, compressed, written and synced shards, with their manifest. `discard`: the same
engine in the same process captures, but the files are removed unread; the two take turns. Upstream:
`speculators generate-offline-data --validate-outputs` and a vLLM server, with a batch of 4,096
tokens, 32 sequences, concurrency 32 and staging in /dev/shm. Model loads are not counted, nor
is the start of upstream's program (measured by a second call, which finds everything done).

    python benchmarks/extract_states.py --samples 320
"""

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import extraction_inputs as inputs
from common import ROOT, record


def ours(verifier, rows, layer_ids, rounds: int, folder: Path) -> list[dict]:
    from aerie import config
    from aerie.common.progress import JobProgress
    from aerie.engine.in_process import InProcessEngine
    from aerie.engine.protocol import Request
    from aerie.engine.staging import Staging
    from aerie.extraction.run import describe_lane, extract
    from aerie.extraction.work import LaneWork
    from aerie.states.store import Store
    from aerie.states.teacher import Teacher

    model = verifier.folder
    tokens = sum(len(r.input_ids) for r in rows)
    longest = max(len(r.input_ids) for r in rows)
    teacher = Teacher(model)  # a part of the verifier that is loaded, like the engine
    seconds: dict[str, list[float]] = {"discard": [], "ours": []}
    stored = 0
    with (
        Staging() as staging,
        InProcessEngine(
            model,
            config.Engine(**inputs.ENGINE),
            max_model_len=longest + 1,
            capture_ids=layer_ids,
            staging=staging.folder,
        ) as engine,
    ):

        def discard(chosen, name):
            for answer in engine.run(Request(f"{name}{r.id}", r.input_ids, 1) for r in chosen):
                answer.states.unlink()

        def make_shards(chosen, name):
            store = Store(folder / name, inputs.convention(verifier))
            work = LaneWork(store, {r.id: r for r in chosen}, inputs.shards(chosen))
            with JobProgress("extract", len(chosen), "samples") as progress:
                counts = extract(
                    work,
                    lambda: contextlib.nullcontext(engine),
                    lambda: teacher,
                    progress,
                    staging_bytes=staging.limit,
                    min_kept_share=1.0,
                )
            manifest = describe_lane(work, counts, 1.0)
            manifest.write(folder / f"{name}.json")
            return manifest

        discard(rows[:64], "warm-up")
        make_shards(rows[64:128], "warm-up")  # what is compiled is compiled once on a machine
        for number in range(rounds):
            start = time.monotonic()
            discard(rows, f"d{number}-")
            seconds["discard"].append(time.monotonic() - start)
            start = time.monotonic()
            manifest = make_shards(rows, str(number))
            seconds["ours"].append(time.monotonic() - start)
            stored = manifest.bytes / manifest.raw_bytes
            assert manifest.extracted_tokens == tokens
    found = [
        {
            "side": side,
            "seconds": statistics.median(s),
            "tokens_per_s": tokens / statistics.median(s),
        }
        for side, s in seconds.items()
    ]
    found[1]["bytes_on_disk"] = stored
    return found


def upstream(verifier, rows, layer_ids, folder: Path) -> list[dict]:
    from datasets import Dataset

    tokens = sum(len(r.input_ids) for r in rows)
    data = folder / "data"
    Dataset.from_list(
        [{"input_ids": r.input_ids, "loss_mask": [1] * len(r.input_ids)} for r in rows]
    ).with_format("torch").save_to_disk(str(data))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    staging = tempfile.mkdtemp(prefix="upstream-", dir="/dev/shm")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "scripts"),
        "VLLM_CPU_KVCACHE_SPACE": str(inputs.ENGINE["cpu_cache_gib"]),
    }
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
    }
    transfer = {
        # vLLM's own connector does not run on a CPU; ours differs from it in the copy only.
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "aerie.engine.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": staging,
        },
    }
    longest = max(len(r.input_ids) for r in rows)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", verifier.path, "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", str(longest + 1), "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", str(inputs.ENGINE["max_num_seqs"])]
    command += ["--max-num-batched-tokens", str(inputs.ENGINE["max_num_batched_tokens"])]
    command += ["--speculative-config", json.dumps(speculative)]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(600):
            if server.poll() is not None:
                sys.exit(f"the server ended:\n{(folder / 'server.log').read_text()[-3000:]}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            time.sleep(0.5)
        program = [str(Path(sys.executable).parent / "speculators"), "generate-offline-data"]
        program += ["--preprocessed-data", str(data), "--validate-outputs", "--concurrency", "32"]
        program += ["--endpoint", f"http://127.0.0.1:{port}/v1"]

        def call(*more: str) -> float:
            start = time.monotonic()
            done = subprocess.run(
                [*program, *more], env=environment, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
            return time.monotonic() - start

        call("--max-samples", "64", "--output", str(folder / "warm-up"))
        seconds = call("--output", str(folder / "states"))
        found = len(list((folder / "states").glob("hs_*.safetensors")))
        assert found == len(rows), f"upstream saved {found} of {len(rows)} samples"
        start = call("--output", str(folder / "states"))
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(staging, ignore_errors=True)
    return [
        {
            "side": "upstream",
            "seconds": seconds - start,
            "tokens_per_s": tokens / (seconds - start),
            "bytes_on_disk": 1.0,
            "program_start_seconds": start,
        }
    ]


def main() -> None:
    parser = inputs.parser(__doc__.splitlines()[0], 320)
    parser.add_argument("--rounds", type=int, default=2, help="turns of ours and discard")
    parser.add_argument("--side", choices=["ours", "upstream"], help="one side; prints JSON")
    args = parser.parse_args()
    verifier = inputs.verifier(args.source)
    layer_ids = list(inputs.convention(verifier).layer_ids)
    rows = inputs.rows(verifier, args.conversations, args.samples, args.max_length)
    if args.side:
        with tempfile.TemporaryDirectory(dir=ROOT / "results") as folder:
            if args.side == "ours":
                found = ours(verifier, rows, layer_ids, args.rounds, Path(folder))
            else:
                found = upstream(verifier, rows, layer_ids, Path(folder))
        print("FOUND", json.dumps(found))
        return
    table = []
    for side in ("ours", "upstream"):  # a process each: an engine keeps its cores bound
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout[-3000:] + done.stderr[-5000:])
        table += json.loads(done.stdout.split("FOUND", 1)[1])
    speed = {row["side"]: row["tokens_per_s"] for row in table}
    for row in table:
        row["ours_is"] = f"{speed['ours'] / row['tokens_per_s']:.2f} x"
    record(
        "extract_states",
        table,
        verifier=verifier.source,
        samples=len(rows),
        tokens=sum(len(r.input_ids) for r in rows),
        layer_ids=layer_ids,
        engine=inputs.ENGINE,
    )


if __name__ == "__main__":
    main()
