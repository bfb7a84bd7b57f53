#!/usr/bin/env bash
# Which layers the target drafts best without, untrained. Usage: scripts/search_skip.sh [--keep 18] [--at-once 3] [--texts 5]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.search_skip "+experiment=$EXPERIMENT" "$@"
