#!/usr/bin/env bash
# Makes .venv beside this folder, once, and enters it; the other scripts source it with the extras that they need.
#   bash scripts/setup.sh [extras]       for training; extras, as in setup.py: video,tables
#   PYTHON=python3.12                    the Python it is made of
#   OMNIBAL_TORCH="torch --index-url …"  words for pip: another torch than PyPI's, such as a build for CPUs alone
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MEGATRON="megatron-core>=0.19.2,<0.20"

# One line, and exit code 2, where the Python is none that everything is there for.
check_python() {
    local python="${PYTHON:-python3}" found
    [[ -x .venv/bin/python ]] && python=.venv/bin/python
    found=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || found="none that runs"
    [[ "$found" =~ ^3\.1[123]\. ]] && return
    echo "error: Python 3.11 to 3.13 is needed, which megatron-core is built for; $python is $found:" \
        "$([[ "$python" == .venv* ]] && echo "rm -r .venv, then ")PYTHON=python3.12 bash $0" >&2
    exit 2
}

install() { # EXTRAS
    check_python
    if [[ -z "$there" ]]; then
        echo "== setting up .venv (once): about 3 GB to download and 6 on disk with PyPI's torch, which is built for CUDA;" \
            "with one for CPUs alone (OMNIBAL_TORCH, see scripts/setup.sh) .6 and 2.6 =="
    else
        echo "== bringing .venv up to date: $1 =="
    fi
    [[ -x .venv/bin/python ]] || "${PYTHON:-python3}" -m venv .venv
    # shellcheck disable=SC1091
    source .venv/bin/activate
    # On a terminal pip shows what it downloads; elsewhere these lines say how far it is.
    local torch pip=(python -m pip install --disable-pip-version-check)
    [[ -t 1 ]] || pip+=(--quiet)
    read -ra torch <<<"${OMNIBAL_TORCH:-torch==2.13.0}"
    echo "-- 1 of 4: what builds packages"
    "${pip[@]}" setuptools wheel
    echo "-- 2 of 4: ${torch[0]}, most of the download (minutes)"
    "${pip[@]}" "${torch[@]}"
    echo "-- 3 of 4: $MEGATRON"
    if python -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
        # The cp311 wheel exists and works; only its metadata asks for Python 3.12.
        "${pip[@]}" --no-deps --ignore-requires-python "$MEGATRON"
    fi
    echo "-- 4 of 4: this project and what it needs: $1"
    "${pip[@]}" --no-build-isolation --editable ".[$1]"
    echo "$1" >.venv/ready
}

# What is there stays, and what is asked for comes to it.
there=$(cat .venv/ready 2>/dev/null || true) extras=${there:-train}
for extra in $(tr , " " <<<"${1:-}"); do
    [[ ",$extras," == *",$extra,"* ]] || extras+=",$extra"
done
if [[ "$extras" != "$there" || setup.py -nt .venv/ready ]]; then
    install "$extras"
fi
# shellcheck disable=SC1091
source .venv/bin/activate
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
