# make demo   the whole pipeline on this machine's CPU: from questions to a measured drafter
# make test   everything that CI runs: lint, types, the docs build, every test, those with a real vLLM (CPU build) too
# make check  before a commit: lint, types and the quick tests
# make docs   flag tables and the documentation site, into site/
# make setup  the environment alone (.venv)
# Each target makes the environment that it needs and reuses it afterwards.

# Python 3.11 comes first because the CPU build of vLLM has wheels for it; any Python from 3.10 on runs the package.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	$$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# One thread per process: two cores are soon oversubscribed.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# The quick tests run in two processes, each file in one of them; WORKERS=0 runs them in this one, in order.
WORKERS ?= 2

.PHONY: demo setup test check lint docs docs-build test-quick test-no-native test-vllm clean

demo: $(VENV)/.installed
	$(BIN)/peagle demo --output demo-output

setup: $(VENV)/.installed-dev

# In this order: what fails in seconds comes first.
test:
	$(MAKE) lint
	$(MAKE) docs-build
	$(MAKE) test-quick
	$(MAKE) test-no-native
	$(MAKE) test-vllm

check: lint
	$(PYTEST) tests -n $(WORKERS) --dist loadfile -m "not vllm and not slow"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	$(BIN)/python scripts/make_docs.py
	$(MAKE) docs-build

# Without make_docs.py, so that a stale flag table stays visible to the tests.
docs-build: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir site

test-quick: $(VENV)/.installed-dev
	$(PYTEST) tests -n $(WORKERS) --dist loadfile -m "not vllm" --durations=20

# The same results without our C kernels.
test-no-native: $(VENV)/.installed-dev
	PEAGLE_NATIVE=0 $(PYTEST) tests/kernels tests/drafter tests/train/test_step*.py -m "not slow"

# Builds .venv-vllm; skips with the reason where vLLM cannot be installed (never in CI).
test-vllm: $(VENV)/.installed-dev
	PYTHON="$(PYTHON)" bash scripts/test_vllm.sh --durations=20

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.10 with venv found; install one or say PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml setup.py src/peagle/kernels/kernels.c constraints.txt
	@echo "Installing peagle into $(VENV) (torch is the large part) ..."
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(PIP) -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-vllm demo-output site
