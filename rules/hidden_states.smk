from snakemake.logging import logger

from aerie.manifest import broken_shards

# A lane's manifest is what Snakemake watches, not the shards that it names. When one of them was
# deleted, cut short or moved aside, the lane is run again, as if it had been named after --forcerun.
# (Without `dag_settings` nothing is going to run: `snakemake --lint`, `--unlock`.)
if workflow.is_main_process and workflow.dag_settings:
    for lane in range(CONFIG.hidden_states.lanes):
        manifest = f"{RUN}/hidden_states/lane-{lane}.json"
        if gone := broken_shards(Path(manifest), Path(STORE)):
            logger.warning(
                f"{manifest}: {len(gone)} of its shards are gone from {STORE} or have another "
                f"size ({', '.join(gone[:3])}); they are made again"
            )
            workflow.dag_settings.forcerun = frozenset({*workflow.dag_settings.forcerun, manifest})


rule extract_hidden_states:
    input:
        samples=f"{RUN}/samples/samples.parquet",
        shards=f"{RUN}/samples/shards.json",
        verifier=FINGERPRINT,
    output:
        f"{RUN}/hidden_states/lane-{{lane}}.json",
    log:
        log_of("extract_hidden_states", "{lane}"),
    benchmark:
        benchmark_of("extract_hidden_states", "{lane}")
    conda:
        ENVIRONMENT
    threads: ALL_CORES
    resources:
        engine=1,
    params:
        layer_ids=as_json(CONFIG.hidden_states.layer_ids),
        format=CONFIG.hidden_states.format,
        last_state=CONFIG.hidden_states.last_state,
        lanes=CONFIG.hidden_states.lanes,
        max_length=CONFIG.samples.max_length,
        min_kept_share=CONFIG.hidden_states.min_kept_share,
        dtype=DTYPE,
        version=version_of("hidden_states"),
        trust=trust(),
        progress=progress_of("extract_hidden_states", "{lane}"),
    shell:
        "python {SCRIPTS}/extract_hidden_states.py --samples {input.samples}"
        " --shards {input.shards} --verifier {input.verifier} --store {STORE}"
        " --layer-ids {params.layer_ids:q} --format {params.format}"
        " --last-state {params.last_state} --lane {wildcards.lane}"
        " --lanes {params.lanes} --max-length {params.max_length}"
        " --min-kept-share {params.min_kept_share} {MAX_GIB} --engine {ENGINE:q} {params.trust}"
        " --progress-log {params.progress} --output {output} > {log} 2>&1"
