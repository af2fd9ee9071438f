EVALUATION_SETTINGS = sections_json(CONFIG, "evaluation", "samples", "engine", "verifier")


rule measure_acceptance:
    input:
        drafter=f"{RUN}/drafters/{{name}}/model",
        verifier=FINGERPRINT,
        heldout=f"{RUN}/prompts/heldout.jsonl.zst",
        prompt_sets=[local(f) for f in CONFIG.evaluation.prompt_sets.values()],
    output:
        f"{RUN}/evaluation/{{name}}/acceptance.json",
    log:
        log_of("measure_acceptance", "{name}"),
    benchmark:
        benchmark_of("measure_acceptance", "{name}")
    conda:
        ENVIRONMENT
    threads: ALL_CORES
    resources:
        engine=1,
        gpu=CONFIG.engine_gpus,
        mem_mb=scale_with_attempt(ENGINE_MB),
        runtime=scale_with_attempt(LONG),
    params:
        prompt_sets=[f"{name}={path}" for name, path in CONFIG.evaluation.prompt_sets.items()],
        num_speculative_tokens=CONFIG.evaluation.num_speculative_tokens,
        max_prompts=CONFIG.evaluation.max_prompts,
        max_tokens=CONFIG.evaluation.max_tokens,
        max_length=CONFIG.samples.max_length,
        engine=as_json(CONFIG.engine),
        version=versions.EVALUATION_VERSION,
        trust=TRUST,
        progress=progress_of("measure_acceptance", "{name}"),
    shell:
        "{SUPERVISE} --gpus {resources.gpu} --stage {rule} --log {log} --"
        " python {SCRIPTS}/measure_acceptance.py --settings {EVALUATION_SETTINGS:q}"
        " --drafter {input.drafter} --verifier {input.verifier} --heldout {input.heldout}"
        " --store {STORE} --progress-log {params.progress} --output {output}"


rule measure_speed:
    input:
        drafter=f"{RUN}/drafters/{{name}}/model",
        verifier=FINGERPRINT,
        heldout=f"{RUN}/prompts/heldout.jsonl.zst",
    output:
        f"{RUN}/evaluation/{{name}}/speed.json",
    log:
        log_of("measure_speed", "{name}"),
    benchmark:
        benchmark_of("measure_speed", "{name}")
    conda:
        ENVIRONMENT
    threads: ALL_CORES
    resources:
        engine=1,
        gpu=CONFIG.engine_gpus,
        mem_mb=scale_with_attempt(ENGINE_MB),
        runtime=scale_with_attempt(LONG),
    params:
        num_speculative_tokens=CONFIG.evaluation.num_speculative_tokens,
        prompts=CONFIG.evaluation.speed_prompts,
        max_tokens=CONFIG.evaluation.max_tokens,
        max_length=CONFIG.samples.max_length,
        concurrencies=CONFIG.evaluation.concurrencies,
        engine=as_json(CONFIG.engine),
        version=versions.EVALUATION_VERSION,
        trust=TRUST,
        progress=progress_of("measure_speed", "{name}"),
    shell:
        "{SUPERVISE} --gpus {resources.gpu} --stage {rule} --log {log} --"
        " python {SCRIPTS}/measure_speed.py --settings {EVALUATION_SETTINGS:q}"
        " --drafter {input.drafter} --verifier {input.verifier} --heldout {input.heldout}"
        " --store {STORE} --progress-log {params.progress} --output {output}"
