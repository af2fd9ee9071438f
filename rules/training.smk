def drafter_of(wildcards):
    return CONFIG.drafters[wildcards.name]


def maps_of(wildcards):
    size = drafter_of(wildcards).vocabulary
    if size == "full" or drafter_of(wildcards).from_checkpoint:
        return []
    return [f"{RUN}/vocabulary/{size}/{part}.npy" for part in ("t2d", "d2t")]


def launcher_of(wildcards):
    gpus = drafter_of(wildcards).gpus
    return f"torchrun --standalone --nproc-per-node {gpus}" if gpus > 1 else "python"


rule train_drafter:
    input:
        samples=f"{RUN}/samples/samples.parquet",
        lanes=expand(
            f"{RUN}/hidden_states/lane-{{lane}}.json", lane=range(CONFIG.hidden_states.lanes)
        ),
        maps=maps_of,
        verifier=FINGERPRINT,
    output:
        model=directory(f"{RUN}/drafters/{{name}}/model"),
        metrics=f"{RUN}/drafters/{{name}}/metrics.jsonl",
    log:
        log_of("train_drafter", "{name}"),
    benchmark:
        benchmark_of("train_drafter", "{name}")
    conda:
        ENVIRONMENT
    threads: ALL_CORES
    resources:
        engine=1,
        gpu=lambda wildcards: drafter_of(wildcards).gpus,
        mem_mb=lambda wildcards, attempt: (32_000 * drafter_of(wildcards).gpus or 8_000) * attempt,
        runtime=scale_with_attempt(LONG),
    params:
        settings=lambda wildcards: as_json(drafter_of(wildcards)),
        vocabulary=lambda wildcards, input: (
            f"--vocabulary {os.path.dirname(input.maps[0])}" if input.maps else ""
        ),
        version=versions.TRAINING_VERSION,
        launcher=launcher_of,
        trust=TRUST,
        progress=progress_of("train_drafter", "{name}"),
    shell:
        "{SUPERVISE} --gpus {resources.gpu} --stage {rule} --log {log} --"
        " {params.launcher} {SCRIPTS}/train_drafter.py --samples {input.samples}"
        " --lanes {input.lanes} {params.vocabulary} --verifier {input.verifier}"
        " --store {STORE} --settings {params.settings:q} {params.trust}"
        " --progress-log {params.progress} --model {output.model} --metrics {output.metrics}"
