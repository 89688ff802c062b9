#!/usr/bin/env bash
# Lint, types and tests, from a fresh clone: `bash scripts/test.sh [pytest arguments]`.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
echo "== lint ==" && ruff check . && ruff format --check .
echo "== types ==" && mypy omnibal_ext megatron/vlm tools
echo "== tests ==" && python -m pytest "$@"
