#!/usr/bin/env bash
# Tokens per second by batch size, the batch at which speculation stops to pay, and memory of paged and contiguous rows;
# time-boxed and resumable. Usage: MINUTES=12 scripts/bench_batch.sh [PROMPTS, default 32] [SETTINGS …]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.bench_batch "+experiment=$EXPERIMENT" "benchmark.limit=${1:-32}" "benchmark.minutes=${MINUTES:-12}" "${@:2}"
