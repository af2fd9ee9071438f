# All that the verifier has to fit. Not among `params`: a changed configuration is no reason to
# import the verifier again. (A rule of its own with `ancient` output would not do: Snakemake 9.27.1
# then overlooks changed params further down.)
VERIFIER_SETTINGS = sections_json(
    CONFIG,
    "verifier",
    "corpus",
    "self_prompts",
    "generation",
    "samples",
    "hidden_states",
    "engine",
    "drafters",
    "evaluation",
)


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
        trust=TRUST,
    shell:
        "python {SCRIPTS}/import_verifier.py --settings {VERIFIER_SETTINGS:q} --store {STORE}"
        " --output {output} > {log} 2>&1"
