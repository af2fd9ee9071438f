"""The list of jobs as the workflow writes it; tests/workflow/test_status_jobs.py compares them."""

from aerie.common.jobs import Job, JobList, job_name


def job_list(lanes=1, drafters=None, answers=True) -> JobList:
    """The jobs of a run. `drafters`: name → size of the vocabulary map, None without a map."""
    drafters = {"base": 32000} if drafters is None else drafters
    sizes = sorted({size for size in drafters.values() if size})
    jobs = []

    def add(stage, part, outputs, *needs):
        log = f"logs/{stage}/{part}.log"
        jobs.append(Job(stage=stage, part=part, outputs=outputs, needs=sorted(needs), log=log))
        return job_name(stage, part)

    verifier = add("import_verifier", "run", ["verifier/fingerprint.json"])
    names = ("train.jsonl.zst", "heldout.jsonl.zst", "report.json")
    prompts = add("collect_prompts", "run", [f"prompts/{n}" for n in names])
    responses = []
    if answers:
        made = ["responses/manifest.json"]
        responses = [add("generate_responses", "run", made, prompts, verifier)]
    made = [f"samples/{n}" for n in ("samples.parquet", "shards.json", "report.json")]
    samples = add("tokenize_samples", "run", made, prompts, verifier, *responses)
    maps = {}
    for size in sizes:
        made = [f"vocabulary/{size}/{n}" for n in ("t2d.npy", "d2t.npy", "coverage.json")]
        maps[size] = add("map_vocabulary", str(size), made, samples, verifier)
    states = [
        add("extract_hidden_states", str(i), [f"hidden_states/lane-{i}.json"], samples, verifier)
        for i in range(lanes)
    ]
    trained, measured = {}, []
    for name, size in drafters.items():
        made = [f"drafters/{name}/model", f"drafters/{name}/metrics.jsonl"]
        needs = (samples, verifier, *states, *([maps[size]] if size else []))
        trained[name] = add("train_drafter", name, made, *needs)
    for stage, file in (("measure_acceptance", "acceptance"), ("measure_speed", "speed")):
        for name in drafters:
            made = [f"evaluation/{name}/{file}.json"]
            measured.append(add(stage, name, made, trained[name], prompts, verifier))
    above = [verifier, prompts, *responses, samples, *maps.values(), *states]
    add("render_report", "run", ["report.html"], *above, *trained.values(), *measured)
    return JobList.sort(jobs)
