#!/usr/bin/env bash
# Every model of conf/model on a tiny random likeness: load, parity, exact, exits, HiSpec, PACER.
# Usage: scripts/check_families.sh [MODEL …, default all]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.check_families "$@"
