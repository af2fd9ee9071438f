"""What would run after a change: dry runs on a folder of empty results."""

import itertools
import json
import zipfile

import pytest

from aerie.states.manifest import LaneShard
from support.workflow import EMPTY_LANE, FAR, STAND_IN

TRAINED = {"train_drafter", "measure_acceptance", "measure_speed", "render_report"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A project that looks finished: outputs touched, and recorded by Snakemake."""
    from support.project import Project

    project = Project(tmp_path_factory.mktemp("workflow") / "project")
    script = project.folder / "scripts"
    for path in script.glob("*.py"):
        if path.name != "supervise.py":
            path.write_text(STAND_IN)
    done = project.snakemake()
    assert done.returncode == 0, done.stdout + done.stderr
    return project


def test_everything_runs_at_first(project):
    assert project.planned() == FAR


def test_finished_run_has_no_jobs(finished):
    assert finished.planned() == set()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("drafters={base: {learning_rate: 5e-4}}", TRAINED),
        ("drafters={base: {vocabulary: 1000}}", {"map_vocabulary"} | TRAINED),
        ("drafters={base: {vocabulary: full}}", TRAINED),
        ("drafters={second: {epochs: 1, vocabulary: 4000}}", TRAINED),
        (
            "evaluation={num_speculative_tokens: 5}",
            {"measure_acceptance", "measure_speed", "render_report"},
        ),
        ("evaluation={concurrencies: [1, 4]}", {"measure_speed", "render_report"}),
        ("watch={stall_seconds: 90, stages: {train_drafter: {stall_seconds: 300}}}", set()),
        ("generation={max_tokens: 64}", FAR - {"import_verifier", "collect_prompts"}),
        ("verifier={source: other/model}", FAR - {"collect_prompts"}),
        ("corpus={heldout_share: 0.2}", FAR - {"import_verifier"}),
        ("self_prompts={number: 10}", FAR - {"import_verifier"} | {"write_prompts"}),
        (
            "samples={min_supervised_tokens: 4}",
            FAR - {"import_verifier", "collect_prompts", "generate_responses"},
        ),
    ],
)
def test_changed_key_reruns_what_depends_on_it(finished, change, expected):
    assert finished.planned("--config", change) == expected


def test_other_resources_and_profiles_rerun_nothing(finished):
    more = ("train_drafter:gpu=2", "train_drafter:mem_mb=1", "collect_prompts:runtime=5")
    assert finished.planned("--set-resources", *more) == set()
    for profile in ("slurm", "gpu8"):
        assert finished.planned("--workflow-profile", f"profiles/{profile}") == set()


def test_changed_prompt_set_is_measured_again_only(finished):
    path = finished.folder / "resources/benchmark.jsonl"
    before = path.read_bytes()
    try:
        path.write_bytes(before + b'{"prompt": "And what of the moon?"}\n')
        assert finished.planned() == {"measure_acceptance", "render_report"}
    finally:
        path.write_bytes(before)
        finished.snakemake("--touch")


def test_snakemake_report_contains_the_page(finished):
    page = finished.folder / "results/demo/report.html"
    before = page.read_bytes()
    try:
        page.write_text("the page")
        done = finished.snakemake("--report", "report.zip")
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        page.write_bytes(before)
        finished.snakemake("--touch")
    with zipfile.ZipFile(finished.folder / "report.zip") as packed:
        (name,) = (n for n in packed.namelist() if "/data/raw/" in n)
        assert name.endswith("/report.html")
        assert packed.read(name) == b"the page"


def test_more_prompts_rerun_from_the_prompts(finished):
    path = finished.folder / "resources/prompts/more.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Count to {i}."}) + "\n" for i in range(40)))
    try:
        assert finished.planned() == FAR - {"import_verifier"}
    finally:
        path.unlink()


def test_touched_and_edited_scripts_rerun_nothing(finished):
    for path in (finished.folder / "scripts").rglob("*.py"):
        path.write_text(path.read_text() + "\n# a comment\n")
    assert finished.planned() == set()


def test_deleted_or_truncated_shard_is_extracted_again(finished):
    folder = finished.folder / "results/store/hidden_states" / EMPTY_LANE.convention.key
    folder.mkdir(parents=True)
    manifest = finished.folder / "results/demo/hidden_states/lane-0.json"
    before = manifest.read_bytes()
    names = [f"{number:032x}.safetensors" for number in range(5000)]
    for name in names:
        (folder / name).write_bytes(b"whole")
    about = {"samples": [], "tokens": 0, "checksum": "0" * 16, "split": "train"}
    shards = [LaneShard(id=name[:32], file=name, bytes=5, **about) for name in names]
    lane = EMPTY_LANE.model_copy(update={"shards": shards})
    try:
        lane.write(manifest)
        finished.snakemake("--touch")
        assert finished.planned() == set()
        (folder / names[7]).write_bytes(b"cut")
        assert finished.planned() == {"extract_hidden_states"} | TRAINED
        # The note of it is none of the manifests that plan, store and status read.
        assert list(manifest.parent.glob("lane-*.json")) == [manifest]
        (folder / names[7]).unlink()
        assert finished.planned() == {"extract_hidden_states"} | TRAINED
        (folder / names[7]).write_bytes(b"whole")
        finished.snakemake("--touch")
        assert finished.planned() == set()
        (folder / names[7]).write_bytes(b"cut")
        assert finished.planned() == {"extract_hidden_states"} | TRAINED
    finally:
        manifest.write_bytes(before)
        (manifest.parent / "gone-0.json").unlink(missing_ok=True)
        finished.snakemake("--touch")


def test_lane_without_manifest_runs_again(finished):
    manifest = finished.folder / "results/demo/hidden_states/lane-0.json"
    before = manifest.read_bytes()
    finished.snakemake("--touch")
    assert finished.planned() == set()
    try:
        manifest.unlink()
        assert finished.planned() == {"extract_hidden_states"} | TRAINED
    finally:
        manifest.write_bytes(before)
        (manifest.parent / "gone-0.json").unlink(missing_ok=True)
        finished.snakemake("--touch")


def test_second_configuration_file_is_laid_over_the_first(finished, tmp_path):
    over = tmp_path / "over.yaml"
    over.write_text("drafters:\n  base:\n    learning_rate: 1e-4\n")
    assert finished.planned("--configfile", str(over)) == TRAINED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("drafters={base: {learning_rat: 1}}", "did you mean 'learning_rate'?"),
        ("run=2023_02", "run: found 202302"),
        ("corpus={sources: [nowhere.jsonl]}", "nowhere.jsonl: no such file"),
        ("evaluation={prompt_sets: {quiz: nowhere.jsonl}}", "prompt_sets.quiz: nowhere.jsonl"),
    ],
)
def test_wrong_value_stops_before_any_job(project, change, message):
    done = project.snakemake("--dry-run", "--config", change)
    assert done.returncode == 1
    said = done.stderr.partition("error: ")[2]
    assert message in said
    assert not any(word in said for word in ("Error", "Traceback", "common.smk", ", line "))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("hidden_states={aux_layer_ids: [2, 40]}", "from 0 to 29"),
        ("drafters={base: {vocabulary: 60000}}", "drafters.base.vocabulary: found 60000"),
        ("samples={max_length: 9000}", "handles 8192"),
    ],
)
def test_configuration_that_does_not_fit_stops_before_any_job(finished, change, message):
    status, said = finished.dry_run("--config", change)
    assert status == 1
    assert message in said
    assert "common.smk" not in said


def test_new_run_is_compared_with_an_existing_verifier(project, tmp_path):
    sizes = {"num_hidden_layers": 12, "vocab_size": 5000, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    source = f"verifier={{source: {tmp_path}}}"
    assert project.planned("--config", source) == FAR
    status, said = project.dry_run("--config", source, "hidden_states={aux_layer_ids: [2, 12]}")
    assert (status, "from 0 to 11" in said) == (1, True)
    status, said = project.dry_run("--config", f"verifier={{source: {tmp_path}/none}}")
    assert (status, "none: no such folder" in said) == (1, True)


def test_text_that_looks_like_a_number_can_be_a_name(project):
    done = project.snakemake("--dry-run", "--config", "run=!!str 2023_02")
    assert done.returncode == 0
    assert "results/2023_02/report.html" in done.stdout + done.stderr


def test_heavy_jobs_never_run_side_by_side(project):
    for path in (project.folder / "scripts").glob("*.py"):
        if path.name != "supervise.py":
            path.write_text(STAND_IN + SLOW)
    change = "drafters={a: {vocabulary: full}, b: {vocabulary: full}, c: {vocabulary: full}}"
    done = project.snakemake("--config", change)
    assert done.returncode == 0, done.stdout + done.stderr
    times = [line.split() for line in (project.folder / "times.txt").read_text().splitlines()]
    spans = sorted((float(start), float(end)) for start, end in times)
    # Generation and extraction, then training and two measurements for each of four drafters.
    assert len(spans) == 2 + 4 * 3
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


SLOW = """
import time

if name.startswith(("generate", "extract", "train", "measure")):
    start = time.time()
    time.sleep(0.3)
    with open("times.txt", "a") as file:
        file.write(f"{start} {time.time()}\\n")
"""
