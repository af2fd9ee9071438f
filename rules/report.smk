from aerie.report.run import REPORTED_SECTIONS

REPORT_SETTINGS = sections_json(CONFIG, *REPORTED_SECTIONS)


rule render_report:
    input:
        verifier=FINGERPRINT,
        prompts=f"{RUN}/prompts/report.json",
        responses=list(GENERATED.values()),
        samples=f"{RUN}/samples/report.json",
        coverage=[
            f"{RUN}/vocabulary/{size}/coverage.json"
            for size in sorted({d.vocabulary for d in CONFIG.drafters.values()} - {"full"})
        ],
        lanes=expand(
            f"{RUN}/hidden_states/lane-{{lane}}.json", lane=range(CONFIG.hidden_states.lanes)
        ),
        metrics=expand(f"{RUN}/drafters/{{name}}/metrics.jsonl", name=CONFIG.drafters),
        acceptance=expand(f"{RUN}/evaluation/{{name}}/acceptance.json", name=CONFIG.drafters),
        speed=expand(f"{RUN}/evaluation/{{name}}/speed.json", name=CONFIG.drafters),
    output:
        report(
            f"{RUN}/report.html",
            caption="../report/report.rst",
            category="Report",
            labels={"run": CONFIG.run},
        ),
    log:
        log_of("render_report"),
    benchmark:
        benchmark_of("render_report")
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        gpu=0,
        mem_mb=scale_with_attempt(4_000),
        runtime=scale_with_attempt(60),
    params:
        drafters=list(CONFIG.drafters),
        # Other sections (watch, store, notify) make no other report.
        config=REPORT_SETTINGS,
        version=versions.REPORT_VERSION,
    shell:
        "python {SCRIPTS}/render_report.py --run $(dirname {output}) --drafters {params.drafters}"
        " --settings {REPORT_SETTINGS:q} --output {output} > {log} 2>&1"
