"""Dry runs without importing Snakemake each time: a process that has imported it forks for each.

Start it in a project's folder. It reads one JSON list of arguments a line and answers with a line
of JSON: `status` (exit status) and `output` (both streams).
"""

import json
import os
import sys
import tempfile

import snakemake.cli
import snakemake.persistence
import snakemake.report.html_reporter


def dry_run(arguments: list[str]) -> dict[str, object]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            status = 70
            try:
                snakemake.cli.main(["--cores", "2", "--dry-run", *arguments])
            except SystemExit as done:
                status = done.code if isinstance(done.code, int) else int(done.code is not None)
                if isinstance(done.code, str):  # what Python itself does on its way out
                    print(done.code, file=sys.stderr)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"status": os.waitstatus_to_exitcode(status), "output": text}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(dry_run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
