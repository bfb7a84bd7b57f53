#!/usr/bin/env bash
# PACER against tuned baselines on two pairs, time-boxed and resumable.
# Usage: MINUTES=40 (per pair) scripts/bench_pacer.sh [PROMPTS PER BENCHMARK, default 20] [PAIR …, default: smollm2 skip] [SETTINGS …]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.bench_pacer "benchmark.limit=${1:-20}" "benchmark.minutes=${MINUTES:-40}" "${@:2}"
