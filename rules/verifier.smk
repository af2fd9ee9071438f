rule import_verifier:
    output:
        FINGERPRINT,
    params:
        source=CONFIG.verifier.source,
        trust=trust(),
    log:
        log_of("import_verifier"),
    benchmark:
        benchmark_of("import_verifier")
    conda:
        ENVIRONMENT
    shell:
        "python {SCRIPTS}/import_verifier.py --source {params.source:q} --store {STORE}"
        " {params.trust} --output {output} > {log} 2>&1"


rule check_run:
    input:
        FINGERPRINT,
    output:
        f"{RUN}/checks.json",
    params:
        config=as_json(CONFIG),
    log:
        log_of("check_run"),
    conda:
        ENVIRONMENT
    shell:
        "python {SCRIPTS}/check_run.py --verifier {input} --config {params.config:q}"
        " --output {output} > {log} 2>&1"
