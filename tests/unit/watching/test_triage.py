"""The catalogue of messages, and what is made of whole logs. Logs under logs/ are real ones."""

import io
import itertools
import json
import os
import resource
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from aerie.common.errors import InputError
from aerie.watching.catalogue import Catalogue, needles
from aerie.watching.log_file import triage
from aerie.watching.triage import Triage
from support.paths import ROOT

PATTERNS = ROOT / "config" / "log_patterns.yaml"
LOGS = Path(__file__).parent / "logs"
CATALOGUE = Catalogue.load(PATTERNS)


def findings(text: str | bytes):
    data = text if isinstance(text, bytes) else text.encode()
    return triage(io.BytesIO(data), "a.log", CATALOGUE)


def brief(text: str | bytes):
    return [(f.level, f.id, f.count, f.first_line) for f in findings(text)]


# The catalogue


def test_the_catalogue_has_forty_patterns_of_every_class():
    assert len(CATALOGUE.patterns) >= 40
    assert {p.level for p in CATALOGUE.patterns} == {"benign", "hint", "degraded", "fatal"}


@pytest.mark.parametrize("pattern", CATALOGUE.patterns, ids=lambda p: p.id)
def test_a_pattern_finds_its_own_line_alone_and_after_prefixes(pattern):
    assert brief(pattern.test) == [(pattern.level, pattern.id, 1, 1)]
    prefixed = f"fine\n\x1b[31m(EngineCore pid=7) {pattern.test}\x1b[0m\n"
    assert [(f.level, f.id) for f in findings(prefixed)] == [(pattern.level, pattern.id)]


@pytest.mark.parametrize("pattern", CATALOGUE.patterns, ids=lambda p: p.id)
def test_a_pattern_can_be_looked_for_by_plain_text(pattern):
    # Without such texts every line of a log would be searched with every pattern.
    assert all(len(text) >= 4 for text in needles(pattern.pattern))
    assert any(text in pattern.test for text in needles(pattern.pattern))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("abc", ["abc"]),
        ("ab?cde", ["cde"]),
        ("one thing|another", ["one thing", "another"]),
        ("x(?:first|second) of all", [" of all"]),
        (r"\d+ .*", [" "]),
        (r"\d+|abc", []),
    ],
)
def test_needles(pattern, expected):
    assert needles(pattern) == expected


# What the issue and the field name; lines as they were reported.
@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("cannot import name 'SparseMatrix' from 'triton_kernels.tensor'", "benign"),
        (
            "ERROR 03-04 10:11:12 [gpt_oss_triton_kernels_moe.py:61] Failed to import Triton "
            "kernels. Please make sure your triton version is compatible. Error: cannot import "
            "name 'SparseMatrix' from 'triton_kernels.tensor'",
            "benign",
        ),
        ("OSError: [Errno 98] Address already in use", "fatal"),
        ("OSError: [Errno 122] Disk quota exceeded", "fatal"),
        ("ImportError: /x/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda", "fatal"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: header too large",
         "fatal"),
        ("[W1130 18:00:00.1 x.cpp:1] something new (function operator())", "unknown"),
        ("INFO 11-30 18:00:00 [x.py:1] the Error: counter is 0 WARNING", None),
        ("train loss 2.13, no errors", None),
        # Not killed for memory: it follows from another rank's failure.
        ("W1130 18:00:00.1 1 torch/distributed/elastic/multiprocessing/api.py:908] Unable to "
         "shutdown process 17 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL",
         "unknown"),
        ("E1130 18:00:00.1 1 x.py:1] Signal 9 (SIGKILL) received by PID 17", "fatal"),
        ("/x/y.py:3: UserWarning: watch out", "unknown"),
    ],
)  # fmt: skip
def test_lines(line, level):
    assert [f.level for f in findings(line)] == ([level] if level else [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- id: a\n  class: bad\n", "entry 1"),
        ("- id: a\n  klass: benign\n", "klass"),
        ("- just text\n", "entry 1"),
        ("a: [\n", "cannot be read"),
    ],
)
def test_a_catalogue_that_is_not_valid_is_told(tmp_path, text, message):
    path = tmp_path / "patterns.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        Catalogue.load(path)


# Tracebacks

PLAIN = """\
Traceback (most recent call last):
  File "/opt/a.py", line 3, in main
    f("CUDA out of memory")
      ^^^^^^^^^^^^^^^^^^^^
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/opt/b.py", line 11, in load
    raise ValueError(1)
ValueError: bad 3
"""


def test_a_traceback_is_one_finding_with_its_last_line_and_cause():
    (found,) = findings("start\n" + PLAIN)
    assert (found.level, found.id, found.count, found.first_line) == ("fatal", None, 1, 2)
    assert found.text == "ValueError: bad 3 (from: KeyError: 'x')"
    assert "/opt/b.py:11 in load" in found.meaning


def test_a_traceback_that_was_survived_is_unknown():
    (found,) = findings(PLAIN + "step\n" * 30)
    assert found.level == "unknown"


def test_a_chain_is_named_by_the_exception_that_is_known():
    text = PLAIN.replace("KeyError: 'x'", "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB")
    text = text.replace("ValueError: bad 3", "RuntimeError: Engine core initialization failed.")
    (found,) = findings(text)
    assert found.id == "cuda_out_of_memory"
    assert found.text.startswith("RuntimeError: Engine core initialization failed.")


def test_tracebacks_of_several_processes_are_kept_apart():
    a = [
        f"(EngineCore_DP0 pid=68) ERROR 02-06 16:34:06 [core.py:936] {x}"
        for x in PLAIN.split("\n")[:5]
    ]
    b = [
        f"[rank1]: {x}"
        for x in PLAIN.replace(
            "KeyError: 'x'", "OSError: [Errno 28] No space left on device"
        ).split("\n")[:5]
    ]
    mixed = "\n".join(line for pair in zip(a, b, strict=True) for line in pair)
    found = {f.text: f for f in findings(mixed)}
    assert set(found) == {"KeyError: 'x'", "OSError: [Errno 28] No space left on device"}
    assert found["OSError: [Errno 28] No space left on device"].id == "disk_full"


def test_a_viewer_that_took_the_blanks_away():
    text = "\n".join(f"ERROR 02-06 16:34:06 [core.py:936] {x.strip()}" for x in PLAIN.split("\n"))
    assert [f.text for f in findings(text)] == ["ValueError: bad 3 (from: KeyError: 'x')"]


def test_an_exception_group_is_one_finding(tmp_path):
    program = tmp_path / "g.py"
    program.write_text(
        "def f():\n    raise OSError(28, 'No space left on device')\n"
        "found = [ValueError('a')]\n"
        "try:\n    f()\nexcept OSError as e:\n    found.append(e)\n"
        "raise ExceptionGroup('several', found)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    (found,) = findings(done.stderr)
    assert found.id == "disk_full"
    assert found.text.startswith("ExceptionGroup: several (2 sub-exceptions) (from: OSError")


def test_a_message_of_several_lines_is_read_to_its_end():
    text = PLAIN.replace(
        "ValueError: bad 3",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (4096) is greater than the derived one",
    )
    assert [f.id for f in findings(text)] == ["max_length_too_long"]


def test_what_python_ignores_is_not_fatal():
    text = "Exception ignored in: <function X.__del__ at 0x7f3>\n" + PLAIN
    assert [f.level for f in findings(text)] == ["unknown"]


def test_a_traceback_that_is_cut_off_is_told():
    (found,) = findings("\n".join(PLAIN.split("\n")[:3]))
    assert (found.level, found.id) == ("unknown", None)
    assert "/opt/a.py:3 in main" in found.text


# Whole logs


def test_unknown_messages_are_grouped_without_numbers_and_paths():
    lines = [
        f"WARNING 11-30 18:00:{i:02} [x.py:1] odd {i} at /data/{i}/f.bin 0x7f{i:06x}"
        for i in range(50)
    ]
    assert brief("\n".join([*lines, "WARNING: quite another thing"])) == [
        ("unknown", None, 50, 1),
        ("unknown", None, 1, 51),
    ]


def test_bars_are_folded_and_what_follows_them_is_seen():
    bars = "".join(f"\rLoading:  {i}%|██ | {i}/100 [00:01<00:04, 1.0s/it]" for i in range(100))
    text = bars + "huggingface/tokenizers: The current process just got forked, after parallelism "
    text += "has already been used. Disabling parallelism to avoid deadlocks...\nend\r\n"
    assert brief(text) == [("benign", "tokenizers_fork", 1, 1)]


def test_the_gravest_comes_first_and_consequences_after_their_cause():
    text = (
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
        "Using a slow tokenizer. This might\nWARNING: hm\n"
        "Unrecognized keys in `rope_scaling` for 'rope_type'='yarn': {'attn_factor'}\n"
        "torch.OutOfMemoryError: CUDA out of memory.\n"
    )
    assert [f.id for f in findings(text)] == [
        "cuda_out_of_memory",
        "engine_start_failed",
        "rope_unknown_keys",
        None,
        "slow_tokenizer",
    ]


def test_a_run_of_ours_that_went_well_has_nothing_grave_and_nothing_unknown():
    found = findings((LOGS / "engine_clean.txt").read_bytes())
    assert {f.level for f in found} == {"benign", "hint"}


def test_an_engine_of_ours_that_did_not_start_is_explained():
    found = findings((LOGS / "engine_fail.txt").read_bytes())
    assert found[0].id == "cpu_memory_for_cache"
    assert "engine.cpu_cache_gib" in found[0].advice
    assert [f.id for f in found if f.level == "fatal"] == [
        "cpu_memory_for_cache",
        "engine_start_failed",
    ]
    assert not [f for f in found if f.level == "unknown"]


@pytest.mark.parametrize(
    "data",
    [
        b"caf\xe9 OSError: [Errno 28] No space left on device\n",
        "OSError: [Errno 28] No space left on device\r\n".encode("utf-16"),
        b"\xef\xbb\xbfOSError: [Errno 28] No space left on device",
        b"\0" * 100_000 + b"\nOSError: [Errno 28] No space left on device\n",
    ],
    ids=["latin-1", "utf-16", "bom", "zeros of a cut log"],
)
def test_encodings(data):
    assert [f.id for f in findings(data)] == ["disk_full"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytes(range(256)) * 100, "binary"),
        (b"\0" * 100, "binary"),
        (b"\x1f\x8b\x08\0", "gunzip"),
        (b"\x28\xb5\x2f\xfd\0", "zstd -d"),
    ],
)
def test_what_is_no_log_is_told(data, message):
    with pytest.raises(InputError, match=message):
        findings(data)


def test_memory_stays_constant_whatever_the_log_holds(tmp_path):
    class Log(io.RawIOBase):
        """Distinct errors, distinct tracebacks, a bar without an end, a very long line."""

        def __init__(self):
            self.parts = self.generate()

        def generate(self):
            names = ["".join(x) for x in itertools.product("abcdefghijkl", repeat=3)]
            for name in names:
                yield f"ERROR: kind {name} of {name * 100}\n".encode()
                yield f'Traceback (most recent call last):\n  File "{name}", line 1\n'.encode()
            for _ in range(6):
                yield b"\r 10%|###  | 1/10 [00:00<00:01, 9it/s] some" * 20_000
            yield b"\n" + b"x" * (4 << 20)
            for _ in range(4):
                yield b"epoch 3 step 12 loss 3.4 tokens/s 1234\n" * 30_000
            yield b"OSError: [Errno 28] No space left on device\n"

        def read(self, size=-1):
            block = b""
            while len(block) < size and (part := next(self.parts, b"")):
                block += part
            return block

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = triage(Log(), "big", CATALOGUE)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 40 * 1024  # KiB
    assert found[0].id == "disk_full"


def words(number: int) -> str:
    """Letters that no other number has, and that are not folded as numbers are."""
    return "".join(chr(ord("g") + int(d)) for d in str(number))


def test_ever_more_kinds_of_tracebacks_take_no_more_memory_and_the_last_is_seen(monkeypatch):
    monkeypatch.setattr("aerie.watching.triage.KINDS", 50)
    trace = 'Traceback (most recent call last):\n  File "/a.py", line 3, in f\n{}Error: {}\n'
    kinds = [trace.format("Odd", words(i) * 50) for i in range(600)]
    judge = Triage(CATALOGUE)
    tracemalloc.start()
    judge.feed("".join(kinds[:100]))
    before = tracemalloc.get_traced_memory()[0]
    judge.feed("".join(kinds[100:]))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 50_000  # of 500 messages of 150 characters
    judge.feed("step\n" * 30 + trace.format("Key", "this ended it"))
    first, *others = judge.finish()
    assert (first.level, first.text, first.first_line) == ("fatal", "KeyError: this ended it", 1831)
    assert sum(f.count for f in others) == 601
    judge = Triage(CATALOGUE)
    judge.feed("".join(kinds[:100]) + "step\n" * 30)
    assert {f.level for f in judge.finish()} == {"unknown"}


def test_a_line_of_megabytes_takes_no_longer_than_its_pieces():
    # A search with a wildcard takes time by the square of the line's length.
    line = "enable_prefix_caching=True " * 38_000 + "\n"
    start = time.process_time()
    findings(line + "OSError: [Errno 28] No space left on device\n")
    assert time.process_time() - start < 20  # in one piece: minutes


# The command


def run(*arguments: str, **options):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "triage_log.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
        **options,
    )


def test_the_command_prints_json_and_tells_by_its_exit_status(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(PLAIN + "WARNING: quite new\n")
    done = run(str(log), "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    keys = {"class", "id", "count", "first_line", "text", "meaning", "advice"}
    assert all(set(f) == keys for f in found)
    assert [(f["class"], f["id"]) for f in found] == [("fatal", None), ("unknown", None)]
    log.write_text("WARNING: quite new\n")
    assert run(str(log)).returncode == 0
    log.write_bytes(b"")
    done = run(str(log))
    assert (done.returncode, "empty" in done.stdout) == (0, True)
    assert json.loads(run(str(log), "--json").stdout) == []
    log.write_bytes(bytes(range(256)))
    done = run(str(log))
    assert (done.returncode, "binary" in done.stderr) == (2, True)
    done = run(str(tmp_path / "none.log"))
    assert (done.returncode, "No such file" in done.stderr) == (2, True)


def test_the_command_says_what_to_do_first():
    done = run(str(LOGS / "engine_fail.txt"))
    assert done.stdout.startswith("fatal  cpu_memory_for_cache")
    assert "→ Lower engine.cpu_cache_gib" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("benign  ")


def test_a_failed_run_shows_what_its_log_means(project):
    for name in ("import_verifier", "collect_prompts"):
        (project.folder / "scripts" / f"{name}.py").write_text(
            "raise SystemExit('OSError: [Errno 28] No space left on device')\n"
        )
    done = subprocess.run(
        ["scripts/run_workflow.sh", str(Path(sys.executable).parent / "snakemake"), "--cores", "1"],
        cwd=project.folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
    )
    assert done.returncode == 1
    assert "fatal  disk_full" in done.stderr
