# The settings are not params: other layers, shards, server addresses or engine options, or another
# samples.min_supervised_tokens, are no reason to answer again. Extraction makes what is missing.
GENERATE_SETTINGS = sections_json(
    CONFIG, "generation", "samples", "hidden_states", "engine", "verifier"
)
ASKS_ENDPOINTS = bool(CONFIG.generation.endpoints)


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
    threads: 1 if ASKS_ENDPOINTS else ALL_CORES
    resources:
        engine=0 if ASKS_ENDPOINTS else 1,
        gpu=0 if ASKS_ENDPOINTS else CONFIG.engine_gpus,
        mem_mb=scale_with_attempt(4_000 if ASKS_ENDPOINTS else ENGINE_MB),
        runtime=scale_with_attempt(LONG),
    params:
        temperature=CONFIG.generation.temperature,
        top_p=CONFIG.generation.top_p,
        max_tokens=CONFIG.generation.max_tokens,
        max_length=CONFIG.samples.max_length,
        seed=CONFIG.generation.seed,
        first_turn_only=CONFIG.generation.first_turn_only,
        asks_endpoints=ASKS_ENDPOINTS,
        endpoint_model=CONFIG.generation.endpoint_model if ASKS_ENDPOINTS else None,
        dtype=DTYPE,
        version=versions.RESPONSES_VERSION,
        trust=CONFIG.verifier.trust_remote_code,
        progress=progress_of("generate_responses"),
    shell:
        "{SUPERVISE} --gpus {resources.gpu} --stage {rule} --log {log} --"
        " python {SCRIPTS}/generate_responses.py --train {input.train} --heldout {input.heldout}"
        " --verifier {input.verifier} --store {STORE} --settings {GENERATE_SETTINGS:q}"
        " --progress-log {params.progress} --output {output}"
