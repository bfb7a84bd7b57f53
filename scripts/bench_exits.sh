#!/usr/bin/env bash
# Agreement of SmolLM2's exits by kind of head, with what training took; what is finished is kept.
# Usage: MINUTES=10 (of training, per kind) scripts/bench_exits.sh [SETTINGS …]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.bench_exits "+experiment=exits/${EXPERIMENT#pacer/}" "trainer.max_minutes=${MINUTES:-10}" "$@"
