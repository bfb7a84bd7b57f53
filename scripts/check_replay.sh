#!/usr/bin/env bash
# Replay against measurement in float32, time-boxed and resumable.
# Usage: MINUTES=15 scripts/check_replay.sh [PROMPTS PER BENCHMARK, default 4]
#        scripts/check_replay.sh runs/evaluate/NAME/HASH    a run that was measured already (rounds and speed reported)
source "$(dirname "$0")/setup.sh"
if [ -d "${1:-}" ]; then exec "$PYTHON" -m scripts.check_replay "$@"; fi
exec "$PYTHON" -m scripts.check_replay "+experiment=$EXPERIMENT" "benchmark.limit=${1:-4}" \
    "benchmark.minutes=${MINUTES:-15}" benchmark.split=all benchmark.max_new_tokens=64 profile.repeats=15 "${@:2}"
