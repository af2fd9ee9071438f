CAPTURE = (
    as_json(
        {
            "layer_ids": CONFIG.hidden_states.layer_ids,
            "samples_per_shard": CONFIG.hidden_states.samples_per_shard,
            "format": CONFIG.hidden_states.format,
        }
    )
    if CONFIG.generation.capture
    else "null"
)


rule generate_responses:
    input:
        CHECKED,
        train=f"{RUN}/prompts/train.jsonl.zst",
        heldout=f"{RUN}/prompts/heldout.jsonl.zst",
        verifier=FINGERPRINT,
    output:
        f"{RUN}/responses/manifest.json",
    params:
        temperature=CONFIG.generation.temperature,
        top_p=CONFIG.generation.top_p,
        max_tokens=CONFIG.generation.max_tokens,
        max_length=CONFIG.samples.max_length,
        min_supervised_tokens=CONFIG.samples.min_supervised_tokens,
        seed=CONFIG.generation.seed,
        capture=CAPTURE,
        engine=ENGINE,
        trust=trust(),
        progress=progress_of("generate_responses"),
    threads: ALL_CORES
    resources:
        engine=1,
    log:
        log_of("generate_responses"),
    benchmark:
        benchmark_of("generate_responses")
    conda:
        ENVIRONMENT
    shell:
        "python {SCRIPTS}/generate_responses.py --train {input.train} --heldout {input.heldout}"
        " --verifier {input.verifier} --store {STORE} --temperature {params.temperature}"
        " --top-p {params.top_p} --max-tokens {params.max_tokens}"
        " --max-length {params.max_length}"
        " --min-supervised-tokens {params.min_supervised_tokens} --seed {params.seed}"
        " --capture {params.capture:q} --engine {params.engine:q} {params.trust}"
        " --progress-log {params.progress} --output {output} > {log} 2>&1"
