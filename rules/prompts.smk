from aerie.config import Source
from aerie.corpus.files import expand as expand_source


def source_files(source):
    """Files that Snakemake can watch; a dataset by id has none."""
    if source.path.startswith("hf:"):
        return []
    return [str(path) for path in checked(expand_source, source.path)[0]]


# What is collected: the prompts that the verifier writes are one more source.
COLLECTED = CONFIG.corpus.model_copy(
    update={
        "sources": [
            *CONFIG.corpus.sources,
            *(Source(path=path, name="self") for path in SELF_PROMPTS),
        ]
    }
)
COLLECT_SETTINGS = sections_json(
    CONFIG.model_copy(update={"corpus": COLLECTED}), "corpus", "generation", "evaluation"
)
PROMPT_SETS = list(CONFIG.evaluation.prompt_sets.values()) if CONFIG.corpus.decontaminate else []


# The user's own files are read where they are, also when results go to a storage provider.
rule collect_prompts:
    input:
        [local(f) for source in CONFIG.corpus.sources for f in source_files(source)],
        SELF_PROMPTS,
        [local(f) for f in PROMPT_SETS],
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
        corpus=COLLECTED.model_dump_json(exclude_defaults=True, exclude={"decontaminate"}),
        prompt_sets=PROMPT_SETS,
        version=versions.CORPUS_VERSION,
        progress=progress_of("collect_prompts"),
    shell:
        "python {SCRIPTS}/collect_prompts.py --settings {COLLECT_SETTINGS:q}"
        " --progress-log {params.progress} --output $(dirname {output.report}) > {log} 2>&1"
