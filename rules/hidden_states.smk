from aerie.states.manifest import broken_shards


# Snakemake watches a lane's manifest, not the shards that it lists. If one of them was deleted, cut
# short or moved aside, a note is written; it is an input of the lane, which is then out of date.
# (In a dry run too, which would otherwise announce nothing.) The same holds if the manifest itself
# is gone: Snakemake does not make an intermediate file again when what depends on it exists.
def note_of(lane):
    return Path(f"{RUN}/hidden_states/gone-{lane}.json")


if workflow.is_main_process:
    for lane in range(CONFIG.hidden_states.lanes):
        manifest = Path(f"{RUN}/hidden_states/lane-{lane}.json")
        gone = broken_shards(manifest, Path(STORE))
        if gone:
            logger.warning(
                f"{manifest}: {len(gone)} of its shards are missing from {STORE} or have another "
                f"size ({', '.join(gone[:3])}); they are made again"
            )
        if gone or not manifest.exists() and any(Path(RUN).glob("drafters/*/model")):
            # With the time, because Snakemake compares the content of a newer file.
            write_json(note_of(lane), {"noticed": time.time(), "shards": gone})


EXTRACTION_SETTINGS = sections_json(CONFIG, "hidden_states", "samples", "engine", "verifier")


rule extract_hidden_states:
    input:
        samples=f"{RUN}/samples/samples.parquet",
        shards=f"{RUN}/samples/shards.json",
        verifier=FINGERPRINT,
        gone=lambda wildcards: [str(note) for note in [note_of(wildcards.lane)] if note.exists()],
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
        gpu=CONFIG.engine_gpus,
        mem_mb=scale_with_attempt(ENGINE_MB),
        runtime=scale_with_attempt(LONG),
    params:
        layer_ids=json.dumps(CONFIG.hidden_states.aux_layer_ids),
        format=CONFIG.hidden_states.format,
        last_state=CONFIG.hidden_states.last_state,
        lanes=CONFIG.hidden_states.lanes,
        max_length=CONFIG.samples.max_length,
        min_kept_share=CONFIG.hidden_states.min_kept_share,
        dtype=DTYPE,
        version=versions.SHARD_VERSION,
        trust=TRUST,
        progress=progress_of("extract_hidden_states", "{lane}"),
    shell:
        "{SUPERVISE} --gpus {resources.gpu} --stage {rule} --log {log} --"
        " python {SCRIPTS}/extract_hidden_states.py --samples {input.samples}"
        " --shards {input.shards} --verifier {input.verifier} --store {STORE}"
        " --lane {wildcards.lane} --settings {EXTRACTION_SETTINGS:q}"
        " --progress-log {params.progress} --output {output}"
