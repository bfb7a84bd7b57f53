#!/usr/bin/env bash
# Greedy identity in float32 and chi-square of sampled output. Usage: scripts/check_exact.sh [PROMPTS, default 40]
source "$(dirname "$0")/setup.sh"
PROMPTS=${1:-40}
if ! [[ $PROMPTS =~ ^[1-9][0-9]*$ ]]; then
    echo "error: PROMPTS: $PROMPTS; allowed: whole numbers ≥ 1" >&2
    exit 2
fi
exec "$PYTHON" -m scripts.check_exact "+experiment=hispec/${EXPERIMENT#pacer/}" "benchmark.limit=$(( (PROMPTS + 3) / 4 ))" "${@:2}"
