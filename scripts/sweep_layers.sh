#!/usr/bin/env bash
# Exits and buffers of HiSpec by the cost model, checked by decoding on five points; time-boxed and resumable.
# Usage: MINUTES=20 (of decoding) scripts/sweep_layers.sh [PROMPTS PER BENCHMARK, default 6] [SETTINGS …]
#        e.g. scripts/sweep_layers.sh 6 model.exits.kind=linear
source "$(dirname "$0")/setup.sh"
TUNING=()
# the samples are few: settings are chosen on texts of the corpus, and all prompts are decoded
if [ "$EXPERIMENT" = pacer/demo ]; then TUNING=(replay.texts=corpus benchmark.split=all); fi
exec "$PYTHON" -m scripts.sweep_layers "+experiment=exits/${EXPERIMENT#pacer/}" "benchmark.limit=${1:-6}" \
    "benchmark.minutes=${MINUTES:-20}" benchmark.max_new_tokens=64 benchmark.score=false "${TUNING[@]}" "${@:2}"
