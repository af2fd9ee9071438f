"""The figures for Prometheus, read back with Prometheus's own parser."""

from prometheus_client.parser import text_string_to_metric_families

from aerie.watching.prometheus import as_prometheus


def test_no_series_appears_twice_whatever_the_files_say(run):
    gpu = {"index": 0, "use_percent": 5}
    run.status_file("train_drafter", "base", gpus=[gpu, gpu, {}, {"use_percent": 3}])
    lines = as_prometheus(run.look()).splitlines()
    series = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert sum(line.startswith("aerie_gpu_use_ratio") for line in series) == 2


def test_prometheus_reads_the_figures_back(run):
    name = 'odd"name\\with\nall'
    run.folder.rename(run.folder.parent / name)
    run.folder = run.folder.parent / name
    run.status_file("train_drafter", "base", memory_gib=2.0)
    text = as_prometheus(run.look())
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert all(name.startswith("aerie_") for name in families)
    assert all(f.documentation and f.type == "gauge" for f in families.values())
    state = {
        s.labels["state"]: s.value
        for s in families["aerie_job_state"].samples
        if s.labels["stage"] == "train_drafter"
    }
    assert [k for k, v in state.items() if v] == ["running"] and len(state) == 10
    (memory,) = families["aerie_job_memory_bytes"].samples
    assert memory.value == 2 * 2**30
    assert memory.labels == {"run": name, "stage": "train_drafter", "part": "base"}
    assert families["aerie_job_units"].samples[0].labels["unit"] == "steps"
