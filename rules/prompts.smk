from aerie.config import Corpus
from aerie.corpus.reading import expand as expand_source


def source_files(source):
    """Files that Snakemake can watch; a dataset by id has none."""
    if source.path.startswith("hf:"):
        return []
    return [str(path) for path in checked(expand_source, source.path)[0]]


def corpus_options():
    """The corpus section's leaves as arguments, those that differ from their default."""
    options = []
    for name, value in CONFIG.corpus:
        if (
            name in ("sources", "roles", "decontaminate")
            or value == Corpus.model_fields[name].default
        ):
            continue
        options += [f"--{name.replace('_', '-')}", "null" if value is None else str(value)]
    for name, role in CONFIG.corpus.roles.items():
        options += ["--role", f"{name}={role}"]
    for source in CONFIG.corpus.sources:
        options += ["--source", json.dumps(source.model_dump(exclude_defaults=True))]
    for path in SELF_PROMPTS:
        options += ["--source", json.dumps({"path": path, "name": "self"})]
    if CONFIG.corpus.decontaminate:
        for path in CONFIG.evaluation.prompt_sets.values():
            options += ["--decontaminate", path]
    return options


# The user's own files are read where they are, also when results go to a storage provider.
rule collect_prompts:
    input:
        [local(f) for source in CONFIG.corpus.sources for f in source_files(source)],
        SELF_PROMPTS,
        [local(f) for f in CONFIG.evaluation.prompt_sets.values()]
        if CONFIG.corpus.decontaminate
        else [],
    output:
        train=f"{RUN}/prompts/train.jsonl.zst",
        heldout=f"{RUN}/prompts/heldout.jsonl.zst",
        report=f"{RUN}/prompts/report.json",
    log:
        log_of("collect_prompts"),
    benchmark:
        benchmark_of("collect_prompts")
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        gpu=0,
        mem_mb=scale_with_attempt(4_000),
        runtime=scale_with_attempt(60),
    params:
        mode=CONFIG.generation.mode,
        options=corpus_options(),
        version=versions.CORPUS_VERSION,
        progress=progress_of("collect_prompts"),
    shell:
        "python {SCRIPTS}/collect_prompts.py --mode {params.mode} {params.options:q}"
        " --progress-log {params.progress} --output $(dirname {output.report}) > {log} 2>&1"
