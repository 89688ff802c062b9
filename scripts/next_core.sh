#!/usr/bin/env bash
# What computes with Megatron Core, on its next version: tests in one process, and on two ranks against one.
#   bash scripts/next_core.sh                             with 0.20 of the index, once it is there
#   OMNIBAL_CORE_MAIN=FOLDER bash scripts/next_core.sh    with a folder of Megatron-LM's main, built as a wheel is
# It lies before 0.19 on Python's path, for these tests alone: nothing is installed.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo,test
ROOMS=(models pipeline checkpoint flags joining monitoring profiling preflight hf)
LAUNCHES=("one rank" pipeline tensor data)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "== Megatron Core's next version =="
# No wheel of it is for Python 3.11, where it works.
if ! python -m pip install --quiet --disable-pip-version-check --target "$work/core" --no-deps --ignore-requires-python \
    "${OMNIBAL_CORE_MAIN:-megatron-core>=0.20}" >"$work/log" 2>&1; then
    if [[ -n "${OMNIBAL_CORE_MAIN:-}" ]]; then
        cat "$work/log" >&2
        echo "error: OMNIBAL_CORE_MAIN=$OMNIBAL_CORE_MAIN is no folder of Megatron-LM that can be built" >&2
        exit 2
    fi
    echo "skipped: $(tail -n 1 "$work/log"); OMNIBAL_CORE_MAIN=FOLDER runs a folder of Megatron-LM's main"
    exit
fi
export PYTHONPATH="$work/core${PYTHONPATH:+:$PYTHONPATH}"
python -W ignore -c "import megatron.core as core; print('Megatron Core', core.__version__, 'in', core.__path__[0])"
python -m pytest -n 2 --dist loadfile -m "not starts and not slow" "${ROOMS[@]/#/tests/unit/}"
parity="tests/distributed/test_parity.py::test_every_case_equals_one_process"
parity=("${LAUNCHES[@]/#/"$parity["}")
python -m pytest --long "${parity[@]/%/]}"
