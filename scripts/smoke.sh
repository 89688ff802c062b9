#!/usr/bin/env bash
# What a user has who installs from PyPI, tried: torch's build for CUDA on Python 3.12, and no driver. setup.sh makes it, then
# README's one command trains a few iterations, saves, and its weights are brought back.
#   bash scripts/smoke.sh             with the versions that setup.sh chooses
#   bash scripts/smoke.sh --newest    with the newest that setup.py allows, and the unit tests with them
# Its environments, of 6 GB each, are kept for every checkout until setup.py or setup.sh changes. Where one cannot be made,
# the smoke is skipped with the reason.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VERSION=3.12 MINUTES=25 GIB=9
KEPT="${XDG_CACHE_HOME:-$HOME/.cache}/omnibal"
of_wheels=chosen
[[ "${1:-}" == --newest ]] && of_wheels=newest
home="$KEPT/$of_wheels-$(cat setup.py scripts/setup.sh | sha256sum | cut -c1-16)"

skip() { # REASON
    echo "smoke: skipped: $1"
    exit 0
}

# The first Python of that version which can make environments, wherever it comes from.
find_python() {
    local python
    for python in "python$VERSION" "$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")/versions/$VERSION".*/bin/python \
        "$(uv python find --no-project "$VERSION" 2>/dev/null || true)"; do
        if "$python" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$VERSION')" 2>/dev/null
        then
            echo "$python"
            return
        fi
    done
    return 1
}

# All that it takes to make an environment, or the reason why there is none.
make() {
    local python started=$SECONDS
    python=$(find_python) || skip "no Python $VERSION is here"
    (($(df -Pk "$home" | awk 'END {print $4}') > GIB * 2 ** 20)) || skip "$home has no room for $GIB GiB"
    "$python" -m venv "$home/.venv"
    "$home/.venv/bin/python" -m pip install --quiet --dry-run --no-deps --retries 1 --timeout 15 'torch<3' \
        >"$home/log" 2>&1 || skip "no network: pip finds no torch ($(grep -a -m 1 ERROR "$home/log"))"
    cp -r setup.py pyproject.toml README.md LICENSE scripts omnibal_ext megatron tools examples "$home"
    PYTHON="$python" timeout "${MINUTES}m" bash "$home/scripts/setup.sh" "$1" >"$home/log" 2>&1 || {
        (($? == 124)) && skip "its environment was not made within $MINUTES minutes; the next try goes on from there"
        tail -n 30 "$home/log" >&2
        echo "smoke: scripts/setup.sh failed on Python $VERSION" >&2
        exit 1
    }
    touch "$home/ready"
    echo "smoke: environment made in $((SECONDS - started)) s, which are not the suite's: $home"
}

echo "== smoke: PyPI's torch without a driver =="
mkdir -p "$home" || skip "nothing can be kept in $KEPT"
[[ -z "$(find "$KEPT" "$home" -maxdepth 0 \( ! -uid 0 ! -uid "$EUID" -o -perm /022 \))" ]] ||
    skip "others may write in $KEPT or $home: what is kept there would run here; chmod go-w, or remove it"
exec 9>"$home/lock"
flock 9
# No wheel of this machine's own is taken, and no other torch.
unset OMNIBAL_TORCH PYTHONPATH
export PIP_FIND_LINKS=
if [[ $of_wheels == newest ]]; then
    rm -f "$home/ready" "$home/.venv/ready"
    OMNIBAL_TORCH="torch<3" PIP_UPGRADE=1 PIP_UPGRADE_STRATEGY=eager make demo,test
elif [[ ! -f "$home/ready" ]]; then
    make demo
fi
touch "$home/used"
find "$KEPT" -mindepth 2 -maxdepth 2 -name used -mtime +14 -printf '%h\0' | xargs -0 --no-run-if-empty rm -rf
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$home" OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES='' PATH="$home/.venv/bin:$PATH"
# In a copy of the sources that stays: what Python and numba compile of it is there for the next checkout.
find "$home"/{omnibal_ext,megatron,tools} -name '*.py' -delete
# Files alone: a folder changes while tests beside this compile what is in it, and tar would fail for that.
find omnibal_ext megatron tools examples tests/smoke.py -name __pycache__ -prune -o -type f -print0 |
    tar -c --null -T - | tar -x -C "$home"
(cd "$home" && timeout 15m python tests/smoke.py "$work")
if [[ $of_wheels == newest ]]; then
    PYTHONPATH="$PWD" python -m pytest -n 3 --dist loadfile tests/unit -m "not starts and not slow"
fi
