#!/usr/bin/env bash
# Drafts tried on small budgets, one after the other; what is finished is kept. Usage: MINUTES=4 (per variant) scripts/search_draft.sh [VARIANT …, default: all] [SETTINGS …]
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m scripts.search_draft +experiment=draft/smollm2 "$@"
