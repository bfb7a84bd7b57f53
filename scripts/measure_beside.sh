#!/usr/bin/env bash
# What drafting beside the target costs each side on this machine. Usage: scripts/measure_beside.sh [--rows 1 4] [SETTINGS …]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.measure_beside "+experiment=$EXPERIMENT" "$@"
