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
        " --layer-ids {params.layer_ids:q} --format {params.format} --lane {wildcards.lane}"
        " --lanes {params.lanes} --max-length {params.max_length}"
        " --min-kept-share {params.min_kept_share} --engine {ENGINE:q} {params.trust}"
        " --progress-log {params.progress} --output {output} > {log} 2>&1"
