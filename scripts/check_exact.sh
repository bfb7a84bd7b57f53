#!/usr/bin/env bash
# Greedy identity in float32 and chi-square of sampled output. Usage: scripts/check_exact.sh [PROMPTS, default 40]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" scripts/check_exact.py "+experiment=$EXPERIMENT" "benchmark.limit=$(( (${1:-40} + 3) / 4 ))"
