rule import_verifier:
    output:
        FINGERPRINT,
    log:
        log_of("import_verifier"),
    benchmark:
        benchmark_of("import_verifier")
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        gpu=0,
        mem_mb=scale_with_attempt(4_000),
        runtime=scale_with_attempt(60),
    params:
        source=CONFIG.verifier.source,
        checkpoint=checkpoint_state(CONFIG.verifier.source),
        version=[versions.VERIFIER_VERSION, versions.TEMPLATE_VERSION],
        trust=trust(),
    shell:
        "python {SCRIPTS}/import_verifier.py --source {params.source:q} --store {STORE}"
        " {params.trust} --check {CHECKED:q} --output {output} > {log} 2>&1"
