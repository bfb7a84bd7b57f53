# Sourced by the other scripts: go to the project's root, make the environment if need be, choose the experiment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${DRY:-}" ] || make --no-print-directory setup >&2
PYTHON=.venv/bin/python
# Real data where PACER_DATA names it, else the samples written for this project.
if [ -n "${PACER_DATA:-}" ]; then PAIR="${PAIR:-smollm2}"; else PAIR="${PAIR:-demo}"; fi
EXPERIMENT="pacer/$PAIR"
