#!/usr/bin/env bash
# A Slurm of one node to try and test the workflow's profile with: no systemd, no accounts, no control
# groups, two GPUs that are none. All of it lies in a folder of its own, munge's key and socket too,
# on ports of its own; nothing under /etc is read or written.
#   tests/slurm/one_node.sh start /tmp/one-node      as root, with slurm-wlm and munge installed
#   source /tmp/one-node/environment
#   tests/slurm/one_node.sh stop /tmp/one-node
set -euo pipefail
usage="usage: $0 start|stop FOLDER"
command=${1:?$usage}
folder=$(realpath -m "${2:?$usage}")
export SLURM_CONF=$folder/slurm.conf
PATH=$PATH:/usr/sbin:/sbin

stop() {
    local name pid
    if [[ -e $folder/slurmctld.pid ]]; then
        timeout 10 squeue --noheader --format %i | xargs -r timeout 10 scancel || true
        for _ in $(seq 40); do
            [[ -z $(timeout 5 squeue --noheader 2>/dev/null) ]] && break
            sleep 0.5
        done
    fi
    for name in slurmd slurmctld munged; do
        [[ -s $folder/$name.pid ]] || continue
        pid=$(<"$folder/$name.pid")
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 40); do
            readlink -q "/proc/$pid/exe" >/dev/null || break
            sleep 0.25
        done
        rm -f "$folder/$name.pid"
    done
}

start() {
    local host cpus memory ports
    host=$(hostname -s)
    cpus=$(nproc)
    memory=$(awk '/^MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
    ports=($(python3 -c 'import socket as s; a, b = s.create_server(("", 0)), s.create_server(("", 0))
print(a.getsockname()[1], b.getsockname()[1])'))
    mkdir -p "$folder"/{state,spool,log}
    chmod 755 "$folder"
    for gpu in 0 1; do
        [[ -e $folder/gpu$gpu ]] || mknod "$folder/gpu$gpu" c 1 3 # as /dev/null
    done
    # Cores are shared by up to four jobs, or two of them would be all that runs on a small machine.
    cat >"$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
JobAcctGatherParams=OverMemoryKill
JobCompType=jobcomp/filetxt
JobCompLoc=$folder/log/jobs.txt
MinJobAge=3600
KillWait=5
OverTimeLimit=0
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory Gres=gpu:fake:2 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE DefMemPerCPU=500 OverSubscribe=FORCE:4 State=UP
CONF
    echo "NodeName=$host Name=gpu Type=fake File=$folder/gpu[0-1]" >"$folder/gres.conf"
    # In a job, snakemake-executor-plugin-slurm-jobstep 0.6.1 drops SLURM_CONF with all SLURM_ variables.
    mkdir -p "$folder/bin"
    printf '#!/bin/sh\nSLURM_CONF=%s exec %s "$@"\n' "$SLURM_CONF" "$(command -v srun)" >"$folder/bin/srun"
    chmod +x "$folder/bin/srun"
    printf 'export SLURM_CONF=%s PATH=%s:$PATH\n' "$SLURM_CONF" "$folder/bin" >"$folder/environment"
    (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
    munged --force --key-file "$folder/munge.key" --socket "$folder/munge.socket" \
        --pid-file "$folder/munged.pid" --log-file "$folder/log/munged.log" \
        --seed-file "$folder/munge.seed" 2>"$folder/log/munged.err"
    slurmctld -c
    slurmd
    for _ in $(seq 60); do
        [[ $(timeout 5 sinfo --noheader --format %t 2>/dev/null) == idle ]] && return
        sleep 0.5
    done
    echo "$0: the node does not come up; see $folder/log" >&2
    tail -n 20 "$folder"/log/*.log >&2
    exit 1
}

case $command in
    start) stop && start ;;
    stop) stop ;;
    *) echo "$usage" >&2 && exit 2 ;;
esac
