#!/usr/bin/env bash
# Run Snakemake so that a killed run continues, and a failed one ends with the end of its log and
# what that means.
#   scripts/run_workflow.sh .venv/bin/snakemake --cores all ...
# Exits as Snakemake did. AERIE_CANCEL_LEFT=1 cancels jobs that a killed run left on Slurm, instead
# of waiting for them.
set -uo pipefail

mkdir -p .snakemake/log
mark=$(mktemp .snakemake/started.XXXXXX)
trap 'rm -f "$mark"' EXIT

python=$(dirname "$1")/python
[[ -x $python ]] || python=python

# One run at a time. The holder of this lock is the only one on this machine, so a lock that Snakemake
# finds was left by a killed run, unless snakemake was called without this script or runs here from
# another machine. (Status 1 is "held"; others: no flock on this file system.)
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
            tr '\0' ' ' <"/proc/$process/cmdline" | grep -qE '^[^ ]*python[^ ]* .*snakemake ' &&
            ! grep -qzs '^AERIE_SNAKEMAKE=' "/proc/$process/environ"; then # one within a job on Slurm
            echo "Snakemake works in this folder already (process $process)." >&2
            exit 1
        fi
    done
    # A run renews its lease (results/<run>/.run.lease), the only sign of one on another machine.
    "$python" scripts/find_run.py results || exit 1
    "$@" --unlock --quiet >/dev/null 2>&1
fi

# Jobs on Slurm outlive a killed Snakemake, and their results are kept. Snakemake would submit the
# same jobs a second time. (Its jobs have their rule in the comment.)
left_on_slurm() {
    local jobs
    jobs=$(squeue --noheader --format '%i|%k|%Z' 2>&1) || {
        # Slurm's tools without a cluster are no reason to stop, unless a run here used one.
        [[ ! -e .snakemake/slurm_logs ]] && return
        echo "Jobs of an earlier run may work in this folder, and squeue does not answer: $jobs" >&2
        return 1
    }
    awk -F '|' -v here="$(pwd -P)" '$2 ~ /^rule_/ && $3 == here {print $1}' <<<"$jobs"
}
if command -v squeue >/dev/null; then
    told=
    while left=$(left_on_slurm) || exit 1 && [[ -n $left ]]; do
        if [[ $left != "$told" ]]; then
            echo "Slurm still has jobs of an earlier run in this folder:" $left >&2
            if [[ ${AERIE_CANCEL_LEFT:-} == 1 ]]; then
                echo "They are cancelled." >&2
                scancel $left
            else
                echo "Waiting for their end; AERIE_CANCEL_LEFT=1 cancels them." >&2
            fi
            told=$left
        fi
        sleep 5
    done
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
