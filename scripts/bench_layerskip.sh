#!/usr/bin/env bash
# SmolLM2 tuned by LayerSkip's recipe: its exits, and task scores before and after; what is finished is kept.
# Usage: MINUTES=10 (of tuning) scripts/bench_layerskip.sh [PROMPTS PER BENCHMARK, default 8] [SETTINGS …]
source "$(dirname "$0")/setup.sh"
DATA=()
if [ "$EXPERIMENT" = pacer/demo ]; then DATA=(data=samples); fi
exec "$PYTHON" -m scripts.bench_layerskip +experiment=exits/layerskip "trainer.max_minutes=${MINUTES:-10}" "benchmark.limit=${1:-8}" "${DATA[@]}" "${@:2}"
