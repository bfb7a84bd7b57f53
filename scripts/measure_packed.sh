#!/usr/bin/env bash
# What packed weights save on this CPU, pass by pass; two minutes, with the machine to itself.
# Usage: scripts/measure_packed.sh [SETTINGS …], e.g. scripts/measure_packed.sh model.dtype=float32
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.measure_packed "+experiment=$EXPERIMENT" 'profile.contexts=[256]' profile.repeats=15 "$@"
