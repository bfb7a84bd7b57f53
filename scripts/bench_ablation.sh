#!/usr/bin/env bash
# What PACER's parts are worth, by replay on the tuning prompts and by wall clock; time-boxed and resumable.
# Usage: MINUTES=25 scripts/bench_ablation.sh [PROMPTS PER BENCHMARK, default 8] [SETTINGS …]
#        e.g. scripts/bench_ablation.sh 8 sampling.temperature=0.7
#        longer drafts: scripts/bench_ablation.sh 8 {labels.gamma,preverifier.gamma_max,replay.gamma_max}=32
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.bench_ablation "${EXPERIMENT#pacer/}" "benchmark.limit=${1:-8}" "benchmark.minutes=${MINUTES:-25}" "${@:2}"
