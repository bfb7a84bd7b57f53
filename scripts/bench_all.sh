#!/usr/bin/env bash
# All methods side by side, ranked: settings chosen on the tuning prompts, measured on the others; goes on where it stopped.
# Usage: MINUTES=45 scripts/bench_all.sh [SETTINGS …]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.bench_all "+experiment=all/${EXPERIMENT#pacer/}" "benchmark.minutes=${MINUTES:-45}" "$@"
