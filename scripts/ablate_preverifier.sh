#!/usr/bin/env bash
# What the choices in a pre-verifier are worth; what is finished is kept. Usage: MINUTES=2 (per variant) scripts/ablate_preverifier.sh [SETTINGS …]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.ablate_preverifier "+experiment=$EXPERIMENT" "trainer.max_minutes=${MINUTES:-2}" "$@"
