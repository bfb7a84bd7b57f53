#!/usr/bin/env bash
# Self-speculation side by side: HiSpec, LayerSkip (same heads, same number of settings tried), Kangaroo, AdaDecode,
# HiSpec with pre-verifiers, PACER; time-boxed and resumable.
# Usage: MINUTES=20 scripts/bench_hispec.sh [PROMPTS PER BENCHMARK, default 12] [SETTINGS …]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.bench_hispec "+experiment=hispec/${EXPERIMENT#pacer/}" "benchmark.limit=${1:-12}" "benchmark.minutes=${MINUTES:-20}" "${@:2}"
