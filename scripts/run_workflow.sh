#!/usr/bin/env bash
# Run Snakemake; when it fails, end with the last lines of each failed job's log.
#   scripts/run_workflow.sh .venv/bin/snakemake --cores all ...
# Exits as Snakemake did.
set -uo pipefail

mkdir -p .snakemake/log
mark=$(mktemp .snakemake/started.XXXXXX)
trap 'rm -f "$mark"' EXIT

"$@" && exit
status=$?

# Snakemake's own log of this run names each failed job's log files:
#     log: a.log, b.log (check log file(s) for error details)
find .snakemake/log -name '*.log' -newer "$mark" -exec \
    sed -n 's/^ *log: \(.*\) (check log file.*/\1/p' {} + | sed 's/, /\n/g' | awk '!seen[$0]++' |
    while IFS= read -r log; do
        if [[ -s $log ]]; then
            printf '\n--- the end of %s:\n' "$log"
            tail -n 20 "$log"
        else
            printf '\n--- %s is empty or not there.\n' "$log"
        fi
    done >&2
exit "$status"
