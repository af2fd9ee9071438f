# Prompts that the verifier writes itself; nothing needs them when `self_prompts.number` is 0.
SELF_PROMPTS = [f"{RUN}/prompts/self.jsonl.zst"] if CONFIG.self_prompts.number else []
WRITE_SETTINGS = sections_json(CONFIG, "self_prompts", "engine", "verifier")


rule write_prompts:
    input:
        verifier=FINGERPRINT,
    output:
        prompts=f"{RUN}/prompts/self.jsonl.zst",
        report=f"{RUN}/prompts/self.json",
    log:
        log_of("write_prompts"),
    benchmark:
        benchmark_of("write_prompts")
    conda:
        ENVIRONMENT
    threads: ALL_CORES
    resources:
        engine=1,
        gpu=CONFIG.engine_gpus,
        mem_mb=scale_with_attempt(ENGINE_MB),
        runtime=scale_with_attempt(LONG),
    params:
        settings=as_json(CONFIG.self_prompts),
        dtype=DTYPE,
        version=versions.SELF_PROMPTS_VERSION,
        trust=CONFIG.verifier.trust_remote_code,
        progress=progress_of("write_prompts"),
    shell:
        "{SUPERVISE} --gpus {resources.gpu} --stage {rule} --log {log} --"
        " python {SCRIPTS}/write_prompts.py --verifier {input.verifier} --store {STORE}"
        " --settings {WRITE_SETTINGS:q}"
        " --progress-log {params.progress} --output {output.prompts} --report {output.report}"
