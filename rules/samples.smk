GENERATED = (
    {"responses": f"{RUN}/responses/manifest.json"} if CONFIG.generation.mode == "generate" else {}
)
TOKENIZE_SETTINGS = sections_json(CONFIG, "samples", "hidden_states", "verifier")


rule tokenize_samples:
    input:
        **GENERATED,
        train=f"{RUN}/prompts/train.jsonl.zst",
        heldout=f"{RUN}/prompts/heldout.jsonl.zst",
        verifier=FINGERPRINT,
    output:
        samples=f"{RUN}/samples/samples.parquet",
        shards=f"{RUN}/samples/shards.json",
        report=f"{RUN}/samples/report.json",
    log:
        log_of("tokenize_samples"),
    benchmark:
        benchmark_of("tokenize_samples")
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        gpu=0,
        mem_mb=scale_with_attempt(4_000),
        runtime=scale_with_attempt(60),
    params:
        responses=" ".join(f"--responses {path}" for path in GENERATED.values()),
        max_length=CONFIG.samples.max_length,
        min_supervised_tokens=CONFIG.samples.min_supervised_tokens,
        min_kept_share=CONFIG.samples.min_kept_share,
        max_lost_share=CONFIG.samples.max_lost_share,
        supervise_reasoning=CONFIG.samples.supervise_reasoning,
        samples_per_shard=CONFIG.hidden_states.samples_per_shard,
        last_state=CONFIG.hidden_states.last_state,
        version=versions.SAMPLES_VERSION,
        trust=CONFIG.verifier.trust_remote_code,
    shell:
        "python {SCRIPTS}/tokenize_samples.py --train {input.train} --heldout {input.heldout}"
        " --verifier {input.verifier} {params.responses} --store {STORE}"
        " --settings {TOKENIZE_SETTINGS:q}"
        " --samples {output.samples} --shards {output.shards} --report {output.report}"
        " > {log} 2>&1"
