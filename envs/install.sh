#!/usr/bin/env bash
# Install .venv from the locks:   envs/install.sh cpu|gpu [dev]     (`make env`, `make test`)
#
# .venv holds exactly what the lock says; otherwise it is installed from scratch. The stamp
# (.venv/cpu.stamp, gpu.stamp, dev.stamp) is written last and holds the lock's checksum. If it is
# missing or different, an earlier install was interrupted or used another lock.
#
# Read from the environment:
#   PYTHON             the Python to use (otherwise the right one of python3.x and python3)
#   AERIE_TORCH_INDEX  index with PyTorch's CPU builds, beside pip's configured ones
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:?usage: envs/install.sh cpu|gpu [dev]}
with_dev=${2:-}
case $kind in
    cpu) version=3.11 need_gib=6 flag= ;;
    gpu) version=3.12 need_gib=16 flag=" GPU=1" ;;
    *) echo "envs/install.sh: '$kind' is not a kind of environment; there are cpu and gpu." >&2; exit 2 ;;
esac
log=.venv/install.log

fail() {
    echo "make env: $*" >&2
    exit 1
}

main() {
    exec 9<envs/install.sh
    flock 9 || true # of two runs of make in one folder, the second waits here

    local base_again=
    whole "$kind" || base_again=yes
    # An interrupted or outdated install of the development tools: start from scratch.
    if [[ -n $with_dev && -e .venv/dev.started ]] && ! whole dev; then base_again=yes; fi

    if [[ -n $base_again ]]; then
        check_machine
        find_python
        empty_venv
        install_base
        stamp "$kind"
    fi
    if [[ -n $with_dev ]] && ! whole dev; then
        touch .venv/dev.started
        pip_install dev --requirement envs/dev.lock
        stamp dev
    fi
    # make compares times, so a complete install must be newer than its lock.
    touch ".venv/$kind.stamp"
    if [[ -n $with_dev ]]; then touch .venv/dev.stamp; fi
}

checksum() { sha256sum <"envs/$1.lock"; }
count() { grep -c == "envs/$1.lock"; }
whole() { [[ -e .venv/$1.stamp && $(<".venv/$1.stamp") == "$(checksum "$1")" && -x .venv/bin/python ]]; }
stamp() {
    checksum "$1" >".venv/$1.stamp.new"
    sync ".venv/$1.stamp.new"
    mv ".venv/$1.stamp.new" ".venv/$1.stamp"
}

check_machine() {
    local system free
    system=$(uname -sm)
    [[ $system == "Linux x86_64" ]] || fail "the locks in envs/ are for Linux x86_64 and this is $system."
    free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1024 / 1024)}')
    ((free >= need_gib)) || fail "$need_gib GiB are needed for .venv and $free GiB are free in $PWD; free space, or move the folder."
}

# Sets `python`, of the version the lock is for.
find_python() {
    local candidate found list tried=()
    PATH=${PATH//"$PWD/.venv/bin:"/} # not the Python that is about to be removed
    for candidate in ${PYTHON:-"python$version" python3}; do
        found=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || found="not there"
        if [[ $found == "$version" ]]; then
            python=$candidate
            return
        fi
        tried+=("$candidate is $found")
    done
    list=$(IFS=,; echo "${tried[*]}")
    fail "Python $version is needed for envs/$kind.lock (${list//,/, }); install it or name it, as in: make env$flag PYTHON=/path/to/python$version"
}

# A new .venv. The file `kind` marks it as ours, and says for which lock.
empty_venv() {
    if [[ -e .venv ]]; then
        [[ -e .venv/kind ]] || fail ".venv exists but was not made by make env; move it away first."
        if grep -qsF "$PWD/.venv/" /proc/[0-9]*/maps; then
            fail ".venv must be installed again (its lock has changed, or an install was interrupted), but programs are running from it; run make again when they have ended."
        fi
        find .venv -mindepth 1 -maxdepth 1 ! -name kind -exec rm -rf {} +
    fi
    mkdir -p .venv
    echo "$kind" >.venv/kind
    "$python" -m venv .venv || fail "$python could not make a virtual environment (see above)."
}

install_base() {
    local started=$SECONDS torch
    echo "make env: installing $(count "$kind") packages from envs/$kind.lock into .venv"
    if [[ $kind == cpu ]]; then
        # First, because pip may not find it.
        torch=$(grep ^torch== envs/cpu.lock)
        pip_install torch ${AERIE_TORCH_INDEX:+--extra-index-url "$AERIE_TORCH_INDEX"} "$torch"
    fi
    pip_install "$kind" --requirement "envs/$kind.lock"
    # On all cores; pip uses one. Some packages ship files for other versions of Python:
    # the log names them, and they are harmless.
    show "compiling"
    .venv/bin/python -m compileall -q -j 0 .venv/lib >>"$log" 2>&1 || true
    show
    echo "make env: .venv is ready ($((SECONDS - started)) s)"
}

# pip_install WHAT ARGUMENTS...: pip's output goes to the log, a line of progress to the terminal.
pip_install() {
    local what=$1 total done=0 line
    shift
    if [[ $what == torch ]]; then total=1; else total=$(count "$what"); fi
    {
        echo "== $what"
        .venv/bin/python -m pip install --no-deps --no-input --disable-pip-version-check \
            --no-compile --progress-bar off "$@" 2>&1
    } | while IFS= read -r line; do
        echo "$line" >>"$log"
        case $line in
            Collecting\ * | Processing\ * | "Requirement already"*)
                done=$((done + 1)) line=${line#Requirement already satisfied: }
                line=${line#Collecting } line=${line#Processing }
                show "$done/$total ${line%% *}" ;;
            Installing\ *) show "unpacking (a minute or two)" ;;
        esac
    done || {
        show
        if grep -q "No matching distribution found for torch==.*+cpu" "$log"; then
            fail "pip finds no ${torch:-CPU build of torch} in its configured indexes${AERIE_TORCH_INDEX:+ or in AERIE_TORCH_INDEX}; give one that has PyTorch's CPU builds, as in: AERIE_TORCH_INDEX=https://download.pytorch.org/whl/cpu make env"
        fi
        grep -v "^WARNING: Location" "$log" | tail -n 15 >&2
        fail "pip could not install $what (above is the end of $log)."
    }
    show
}

show() { if [[ -t 1 ]]; then printf '\r\033[K%s' "${1:+  $1}"; fi; }

main
