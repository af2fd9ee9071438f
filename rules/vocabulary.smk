rule map_vocabulary:
    input:
        samples=f"{RUN}/samples/samples.parquet",
        verifier=FINGERPRINT,
    output:
        t2d=f"{RUN}/vocabulary/{{size}}/t2d.npy",
        d2t=f"{RUN}/vocabulary/{{size}}/d2t.npy",
        coverage=f"{RUN}/vocabulary/{{size}}/coverage.json",
    log:
        log_of("map_vocabulary", "{size}"),
    benchmark:
        benchmark_of("map_vocabulary", "{size}")
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        gpu=0,
        mem_mb=scale_with_attempt(4_000),
        runtime=scale_with_attempt(60),
    params:
        version=versions.VOCABULARY_VERSION,
    shell:
        "python {SCRIPTS}/map_vocabulary.py --samples {input.samples}"
        " --verifier {input.verifier} --size {wildcards.size}"
        " --output $(dirname {output.coverage}) > {log} 2>&1"
