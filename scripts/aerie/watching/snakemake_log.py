"""Which jobs failed, from the logs that Snakemake keeps of its runs."""

import re
from pathlib import Path

from aerie.watching.run_files import modified, read_tail

LOGS = 50  # the newest ones that are read
TAIL = 16 << 20  # bytes of each


def failed_logs(folder: Path, began: float | None) -> set[str]:
    """Logs, as `<rule>/<part>.log`, of the jobs of the run in `folder` that failed since it `began`
    and were not started again. Other runs in the same working folder have logs there too."""
    try:
        project = folder.absolute().parents[1]
        logs = [(modified(p) or 0, p) for p in (project / ".snakemake/log").glob("*.log")]
    except (OSError, IndexError):
        return set()
    found: set[str] = set()
    since = [path for written, path in sorted(logs) if written >= (began or 0)]
    for line in (x for p in since[-LOGS:] for x in read_tail(p, TAIL).splitlines()):
        match = re.match(r"    log: (.*?)( \(check log file.*)?$", line)
        for name in match[1].split(", ") if match else []:
            path = Path(name)
            if match and path.parts[-4:-2] == (folder.absolute().name, "logs"):
                key = f"{path.parts[-2]}/{path.name}"
                (found.add if match[2] else found.discard)(key)
    return found
