#!/usr/bin/env bash
# The papers' costs at true shapes, with random weights: c, v, the pre-verifier's share, the verification wall, HiSpec's
# memory. Ten minutes on one GPU; on a CPU shapes are scaled down. Usage: scripts/gpu_shapes.sh [--minutes 9] [--scale N]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.gpu_shapes "$@"
