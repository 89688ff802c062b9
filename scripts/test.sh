#!/usr/bin/env bash
# Lint, types and tests, from a fresh clone:
#   bash scripts/test.sh                      everything, and the smoke of what users install (scripts/smoke.sh)
#   bash scripts/test.sh --long               before a release: the newest packages that setup.py allows, Megatron Core's next
#                                             version, whole grids, all families, every benchmark's short form, the site
#   bash scripts/test.sh --quick              without the tests that start ranks and whole commands
#   bash scripts/test.sh [pytest arguments]   the tests they choose
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo,test"$([[ "${1:-}" != --long ]] || echo ,docs)"
failed=0
said=$(mktemp -d)
declare -A beside=()
trap 'kill "${beside[@]}" 2>/dev/null || true; rm -rf "$said"' EXIT

start() { # NAME COMMAND...: beside the tests, said behind them
    "${@:2}" >"$said/$1" 2>&1 &
    beside[$1]=$!
}

if [[ "${1:-}" == --long ]]; then
    bash scripts/smoke.sh --newest || failed=$?
    bash scripts/next_core.sh || failed=$?
elif [[ $# == 0 ]]; then
    start smoke bash scripts/smoke.sh
elif [[ "$1" == --quick ]]; then
    set -- tests/unit -m "not starts and not slow" "${@:2}"
fi
echo "== lint =="
ruff check .
ruff format --check .
# What mypy and numba have made of the same sources in another checkout is taken: both go by content.
kept="${XDG_CACHE_HOME:-$HOME/.cache}/omnibal"
# Not if others may have written it: that would run here.
python -c "import sys; from omnibal_ext.files.caches import are_foreign; sys.exit(are_foreign(sys.argv[1:]))" \
    "$kept/mypy" "$kept/compiled" || kept="$said/kept"
export MYPY_CACHE_DIR="$kept/mypy"
[[ -e omnibal_ext/__pycache__/compiled.stamp || ! -d "$kept/compiled" ]] || cp -r "$kept/compiled/." .
start types mypy omnibal_ext megatron/vlm tools
echo "== tests =="
# Four test processes for two cores: while some wait for their ranks others work. A file stays in one process, for its
# fixtures.
unset PYTHONDONTWRITEBYTECODE # many of them start Pythons of their own: the first compiles our modules, for all
python -m pytest -n 4 --dist loadfile --no-loadscope-reorder "$@" || failed=$?
rm -rf "$kept/compiled" && mkdir -p "$kept/compiled"
find omnibal_ext \( -name '*.nb[ic]' -o -name compiled.stamp \) -print0 | tar -c --null -T - | tar -x -C "$kept/compiled"
for name in "${!beside[@]}"; do
    wait "${beside[$name]}" || failed=1
    unset "beside[$name]"
    echo "== $name =="
    cat "$said/$name"
done
exit "$failed"
