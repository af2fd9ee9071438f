from snakemake.logging import logger

from aerie.manifest import broken_shards

# A lane's manifest is what Snakemake watches, not the shards that it names. When one of them was
# deleted, cut short or moved aside, the manifest says what is not so: without it the lane runs again
# and makes that shard (the others are found in the store). Settings such as --forcerun are not
# open to a workflow, and a changed param would count as a change once more when all is well again.
if workflow.is_main_process:
    for lane in range(CONFIG.hidden_states.lanes):
        manifest = f"{RUN}/hidden_states/lane-{lane}.json"
        if gone := broken_shards(Path(manifest), Path(STORE)):
            logger.warning(
                f"{manifest} is removed: {len(gone)} of the shards that it names are gone from {STORE} or "
                f"have another size ({', '.join(gone[:3])}); they are made again"
            )
            os.remove(manifest)


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
        engine=ENGINE,
        trust=trust(),
        progress=progress_of("extract_hidden_states", "{lane}"),
    shell:
        "python {SCRIPTS}/extract_hidden_states.py --samples {input.samples}"
        " --shards {input.shards} --verifier {input.verifier} --store {STORE}"
        " --layer-ids {params.layer_ids:q} --format {params.format}"
        " --last-state {params.last_state} --lane {wildcards.lane}"
        " --lanes {params.lanes} --max-length {params.max_length}"
        " --min-kept-share {params.min_kept_share} {MAX_GIB} --engine {params.engine:q} {params.trust}"
        " --progress-log {params.progress} --output {output} > {log} 2>&1"
