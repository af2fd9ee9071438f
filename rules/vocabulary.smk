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
    params:
        version=version_of("vocabulary"),
    shell:
        "python {SCRIPTS}/map_vocabulary.py --samples {input.samples}"
        " --verifier {input.verifier} --size {wildcards.size}"
        " --output $(dirname {output.coverage}) > {log} 2>&1"
