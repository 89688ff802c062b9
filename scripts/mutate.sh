#!/usr/bin/env bash
# Do the tests see faults? Plants those of tests/mutations/faults.jsonl one by one and lists the ones that survive:
#   bash scripts/mutate.sh [names]
#   bash scripts/mutate.sh --random 200 --since COMMIT    random ones, in modules that have changed since
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo,test
python tests/mutations/run.py "$@"
