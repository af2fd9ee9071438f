"""A Snakemake logger plugin that writes the jobs of a run to a file, for `make plan`.

`snakemake --logger aerie --logger-aerie-jobs FILE` writes one JSON object a line for each job:
`rule`, `wildcards` (name → value), `reason` (Snakemake's words) and `output` (paths). The terminal
shows what it shows without the plugin. Snakemake finds the package when `scripts/` is on
`PYTHONPATH`, and imports it at every start, so it imports nothing of the library.
"""

import json
from dataclasses import dataclass, field
from logging import LogRecord
from pathlib import Path

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.settings import LogHandlerSettingsBase


@dataclass
class LogHandlerSettings(LogHandlerSettingsBase):
    jobs: Path | None = field(
        default=None,
        metadata={"help": "File for the jobs as JSON lines", "required": True, "type": Path},
    )


class LogHandler(LogHandlerBase):
    # With a filter of its own the handler sees every event, whatever `--quiet` hides.
    has_filter = True
    has_formatter = True
    writes_to_stream = False
    writes_to_file = True
    needs_rulegraph = False

    def __post_init__(self) -> None:
        # Snakemake lists the log files of its handlers by this name.
        self.baseFilename = str(self.settings.jobs)
        self.file = self.settings.jobs.open("w", encoding="utf-8")

    def emit(self, record: LogRecord) -> None:
        if getattr(record, "event", None) != LogEvent.JOB_INFO:
            return
        job = {
            "rule": record.rule_name,
            "wildcards": dict(record.wildcards),
            "reason": record.reason,
            "output": list(record.output),
        }
        self.file.write(json.dumps(job) + "\n")

    def close(self) -> None:
        self.file.close()
        super().close()
