#!/usr/bin/env bash
# Run Snakemake so that a run that was killed goes on, and a failed one ends with what its log
# means and how it ends.
#   scripts/run_workflow.sh .venv/bin/snakemake --cores all ...
# Exits as Snakemake did.
set -uo pipefail

mkdir -p .snakemake/log
mark=$(mktemp .snakemake/started.XXXXXX)
trap 'rm -f "$mark"' EXIT

python=$(dirname "$1")/python
[[ -x $python ]] || python=python

# One run at a time. Who holds this lock is the only one on this machine, so a lock that Snakemake
# finds was left by a run that was killed, unless somebody called snakemake without this script, or
# works here from another machine. (Status 1 is "held"; others: no flock on this file system.)
exec 9>.snakemake/run.lock
held=0
command -v flock >/dev/null && { flock --nonblock 9 2>/dev/null || held=$?; }
if ((held == 1)); then
    echo "Another run works in this folder ($PWD); wait for it, or stop it first." >&2
    exit 1
fi
if [[ -n $(ls -A .snakemake/locks 2>/dev/null) ]]; then
    for process in $(pgrep -f snakemake); do
        if [[ $process != "$$" && $(readlink "/proc/$process/cwd") == "$PWD" ]] &&
            tr '\0' ' ' <"/proc/$process/cmdline" | grep -qE 'python.*snakemake '; then
            echo "Snakemake works in this folder already (process $process)." >&2
            exit 1
        fi
    done
    # A run renews its lease (results/<run>/.run.lease); one on another machine shows by that only.
    "$python" scripts/find_run.py results || exit 1
    "$@" --unlock --quiet >/dev/null 2>&1
fi

"$@" 9>&- && exit
status=$?

# Snakemake's own log of this run names each failed job's log files:
#     log: a.log, b.log (check log file(s) for error details)
find .snakemake/log -name '*.log' -newer "$mark" -exec \
    sed -n 's/^ *log: \(.*\) (check log file.*/\1/p' {} + | sed 's/, /\n/g' | awk '!seen[$0]++' |
    while IFS= read -r log; do
        if [[ -s $log ]]; then
            printf '\n--- the end of %s:\n' "$log"
            tail -n 20 "$log"
            printf '\n--- what %s means:\n' "$log"
            "$python" scripts/triage_log.py "$log"
        else
            printf '\n--- %s is empty or not there.\n' "$log"
        fi
    done >&2
exit "$status"
