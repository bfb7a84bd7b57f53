#!/usr/bin/env bash
# PACER against tuned baselines on two pairs, time-boxed and resumable.
# Usage: MINUTES=40 (per pair) scripts/bench_pacer.sh [PROMPTS PER BENCHMARK, default 20] [PAIR …, default: smollm2 skip]
source "$(dirname "$0")/setup.sh"
PROMPTS=${1:-20}
exec "$PYTHON" scripts/bench_pacer.py "$PROMPTS" "${MINUTES:-40}" "${@:2}"
