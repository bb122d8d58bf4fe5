# make demo   the whole road on this machine's CPU, from questions to a measured drafter
# make test   every test, those with a real vLLM (CPU build) included
# make check  lint, types and the quick tests, as before a commit
# make docs   the documentation site, into site/
# Each target makes the environment that it needs; a second run finds it there.

# Python 3.11 comes first because the CPU build of vLLM has wheels for it; any Python from 3.10 on runs the package.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	$$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-quick test-vllm check setup docs clean

demo: $(VENV)/.installed
	$(BIN)/peagle demo --output demo-output

setup: $(VENV)/.installed-dev

test: test-quick test-vllm

test-quick: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m "not vllm"

# Builds .venv-vllm; skips with the reason where vLLM cannot be installed (never in CI).
test-vllm: $(VENV)/.installed-dev
	PYTHON="$(PYTHON)" bash scripts/test_vllm.sh

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m "not vllm and not slow"

docs: $(VENV)/.installed-docs
	$(BIN)/python scripts/make_docs.py
	$(BIN)/mkdocs build --strict --site-dir site

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
