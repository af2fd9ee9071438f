# Not among the params, as little as samples.min_supervised_tokens: other layers or shards are no
# reason to answer again; the extraction makes them.
CAPTURE = (
    as_json(
        {
            "layer_ids": CONFIG.hidden_states.aux_layer_ids,
            "samples_per_shard": CONFIG.hidden_states.samples_per_shard,
            "format": CONFIG.hidden_states.format,
            "last_state": CONFIG.hidden_states.last_state,
        }
    )
    if CONFIG.generation.capture and not CONFIG.generation.endpoints
    else "null"
)
# Not among the params: another address of the same model is no reason to run again.
ENDPOINTS = (
    " ".join(f"--endpoint {shlex.quote(url)}" for url in CONFIG.generation.endpoints)
    + f" --endpoint-concurrency {CONFIG.generation.endpoint_concurrency}"
    if CONFIG.generation.endpoints
    else ""
)


rule generate_responses:
    input:
        train=f"{RUN}/prompts/train.jsonl.zst",
        heldout=f"{RUN}/prompts/heldout.jsonl.zst",
        verifier=FINGERPRINT,
    output:
        f"{RUN}/responses/manifest.json",
    log:
        log_of("generate_responses"),
    benchmark:
        benchmark_of("generate_responses")
    conda:
        ENVIRONMENT
    threads: 1 if ENDPOINTS else ALL_CORES
    resources:
        engine=0 if ENDPOINTS else 1,
        gpu=0 if ENDPOINTS else CONFIG.engine_gpus,
        mem_mb=scale_with_attempt(4_000 if ENDPOINTS else ENGINE_MB),
        runtime=scale_with_attempt(LONG),
    params:
        temperature=CONFIG.generation.temperature,
        top_p=CONFIG.generation.top_p,
        max_tokens=CONFIG.generation.max_tokens,
        max_length=CONFIG.samples.max_length,
        seed=CONFIG.generation.seed,
        first_turn_only=flag("--first-turn-only", CONFIG.generation.first_turn_only),
        asks_endpoints=bool(CONFIG.generation.endpoints),
        endpoint_model=(
            ["--endpoint-model", CONFIG.generation.endpoint_model]
            if ENDPOINTS and CONFIG.generation.endpoint_model
            else []
        ),
        dtype=DTYPE,
        version=versions.RESPONSES_VERSION,
        trust=trust(),
        progress=progress_of("generate_responses"),
    shell:
        "{SUPERVISE} --gpus {resources.gpu} --stage {rule} --log {log} --"
        " python {SCRIPTS}/generate_responses.py --train {input.train} --heldout {input.heldout}"
        " --verifier {input.verifier} --store {STORE} --temperature {params.temperature}"
        " --top-p {params.top_p} --max-tokens {params.max_tokens}"
        " --max-length {params.max_length}"
        " --min-supervised-tokens {CONFIG.samples.min_supervised_tokens} --seed {params.seed}"
        " --capture {CAPTURE:q} {MAX_GIB} --engine {ENGINE:q} {params.trust}"
        " {params.first_turn_only} {params.endpoint_model:q} {ENDPOINTS}"
        " --progress-log {params.progress} --output {output}"
