#!/usr/bin/env bash
# The main comparison, time-boxed and resumable. Usage: MINUTES=25 scripts/bench_main.sh [PROMPTS PER BENCHMARK, default 20]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.bench_main "+experiment=$EXPERIMENT" benchmark=main "benchmark.limit=${1:-20}" \
    "benchmark.minutes=${MINUTES:-25}"
