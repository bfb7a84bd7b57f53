#!/usr/bin/env bash
# What PACER's parts are worth, by replay on the tuning prompts and by wall clock; time-boxed and resumable.
# Usage: MINUTES=25 scripts/bench_ablation.sh [PROMPTS PER BENCHMARK, default 8] [TEMPERATURE, default 0]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" scripts/bench_ablation.py "${EXPERIMENT#pacer/}" "${1:-8}" "${MINUTES:-25}" "${2:-0}"
