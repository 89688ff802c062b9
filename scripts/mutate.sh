#!/usr/bin/env bash
# Do the tests see faults? Plants those of tests/mutations one by one and lists the ones that survive:
#   bash scripts/mutate.sh [names]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo,test
python tests/mutations/run.py "$@"
