# make demo    set up, replay the embedded spikes under the recorded methods, show the verdicts
# make test    set up, then every check that needs no GPU
# make lint    set up, then format, lint and types only
# make clean   remove caches, builds and the demo's results (the environment stays)
#
# PYTHON=...   the interpreter to make $(VENV) with. One that holds torch, Megatron-Core and the
#              rest already is used as it is and nothing is installed, unless VENV is given too:
#              GPU nodes without a network keep their own torch.
# VENV=...     where the environment goes, e.g. make test PYTHON=python3.12 VENV=.venv312
# WORKERS=...  processes of the test run (default 2; 0: one process, no xdist)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON_GIVEN := $(filter command environment,$(firstword $(origin PYTHON)))
VENV_GIVEN := $(filter command environment,$(firstword $(origin VENV)))
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
WORKERS ?= 2
START := $(shell date +%s)

NEEDED := torch,megatron.core,numpy,pydantic,yaml,typer,rich,tabulate,filelock,psutil,safetensors,pytest,xdist,pytest_timeout
HOLDS = import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in sys.argv[1].split(",")))
ifneq ($(PYTHON_GIVEN),)
ifeq ($(VENV_GIVEN),)
USE_AS_IS := $(shell $(PYTHON) -c '$(HOLDS)' $(NEEDED) 2>/dev/null && echo yes)
endif
endif

ifeq ($(USE_AS_IS),yes)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

# one thread a process: torch on more threads than cores is slower than on one
export OMP_NUM_THREADS ?= 1
TOOK = echo "$@ took $$(( $$(date +%s) - $(START) )) s"

.PHONY: help demo test lint clean
help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

demo: $(READY)
	@$(PY) -m replay_lib.cli demo
	@$(TOOK)

test: lint
	@$(PY) -m pytest -m "not gpu and not multigpu and not slow" -n $(WORKERS) --dist loadgroup
	@$(TOOK)

lint: $(READY)
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy

clean:
	rm -rf out/demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path '*/.venv*' -prune -exec rm -rf {} +

# Python 3.12 and later need triton for Megatron-Core, which the CPU build of torch lacks. The CPU
# build is a version of its own; where the configured index does not have it, the plain one works.
$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@torch=$$(sed -n 's/^torch==//p' constraints.txt); \
	pip="$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt"; \
	if ! compgen -G '/dev/nvidia[0-9]*' > /dev/null \
	    && $(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then \
	    echo "no NVIDIA device: taking the CPU build of torch $$torch"; \
	    $$pip "torch==$$torch+cpu" || { echo "no CPU build found: taking the plain one"; $$pip "torch==$$torch"; }; \
	else \
	    echo "taking torch $$torch"; $$pip "torch==$$torch"; \
	fi; \
	$$pip -e '.[dev]'
	@touch $@
	@echo "set-up took $$(( $$(date +%s) - $(START) )) s"
