#!/usr/bin/env bash
# The whole pipeline on a tiny model, killed at random points: kills, resumes, differences (0).
# Usage: scripts/kill_campaign.sh [KILLS, default 20] [SEED, default 0]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.kill_campaign "$@"
