# Two commands do it all on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= 2
MARK = not long
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint clean distclean sandbox browser slurm

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo "Variables: PACER_DATA=folder of real data, PACER_CACHE=models and stages, PYTHON=python3,"
	@echo "           PIP_ARGS=options for pip install, TESTS=what make test runs,"
	@echo "           JOBS=processes it runs them in"

setup: $(STAMP) sandbox  ## make .venv and install the exact versions of constraints.txt

demo: setup  ## the main job on the samples in data/: train, measure, table and plot
	$(BIN)/python -m pacer.train +experiment=pacer/demo
	$(BIN)/python -m pacer.evaluate +experiment=pacer/demo

test: setup browser slurm  ## run all tests (PACER_DATA: those on real data too)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "$(MARK)" $(or $(TESTS),tests)

test-all: MARK =
test-all: test  ## the long ones too: minutes each

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:  ## remove caches and build outputs; keeps .venv and runs/
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv and runs/ too
	rm -rf $(VENV) runs

# torch first: the rest then finds it and asks for no other build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev,cluster]'
	@touch $@

# Generated code is scored only inside a sandbox.
sandbox:
	@if command -v bwrap >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	    && (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap) >/dev/null 2>&1; then \
	    echo "installed bubblewrap"; \
	else \
	    echo "hint: without bubblewrap generated code is not scored; install it: sudo apt-get install bubblewrap"; \
	fi

# The tests of the report open it in a browser; without one they are skipped.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	    && (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver) >/dev/null 2>&1; then \
	    echo "installed chromium and chromium-driver"; \
	else \
	    echo "hint: without chromium the report is not tested in a browser; install it: sudo apt-get install chromium chromium-driver"; \
	fi

# The tests of sweeps and requeues run on a Slurm of one node (scripts/slurm_local.sh); without it they are skipped.
slurm:
	@if command -v sbatch >/dev/null && [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/munged ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	    && (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge) >/dev/null 2>&1; then \
	    echo "installed slurm"; \
	else \
	    echo "hint: without Slurm its tests are skipped; install it: sudo apt-get install slurm-wlm munge"; \
	fi
