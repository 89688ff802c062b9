#!/usr/bin/env bash
# Sourced by the other scripts: makes .venv beside this folder once and enters it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One CPU build of torch serves machines without CUDA; where torch is installed already (a container), it is kept.
TORCH="${OMNIBAL_TORCH:-torch==2.13.0}"
MEGATRON="megatron-core>=0.19.2,<0.20"

install() {
    echo "== setting up .venv (once) =="
    "${PYTHON:-python3}" -m venv .venv
    # shellcheck disable=SC1091
    source .venv/bin/activate
    local pip=(python -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" setuptools wheel
    "${pip[@]}" "$TORCH"
    if python -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
        # The cp311 wheel exists and works; only its metadata asks for Python 3.12.
        "${pip[@]}" --no-deps --ignore-requires-python "$MEGATRON"
    fi
    "${pip[@]}" --no-build-isolation --editable '.[demo,test]'
    touch .venv/ready
}

if [[ ! -f .venv/ready || setup.py -nt .venv/ready ]]; then
    install
fi
# shellcheck disable=SC1091
source .venv/bin/activate
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
