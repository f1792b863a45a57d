# `make train` and `make test` are all there is to know; both make .venv first, and need python3 >= 3.10.
#
#   make train ARGS="--nproc 2 --epochs 20"      any flags of evenstep train; they go before those below
#   make test  ARGS="-k layers"                  any arguments of pytest
#   make check                                   lint, types and tests: what must pass before a commit
#   make site                                    the pages of docs/ and the reference as a site, in site/

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
# With the Python that CI has, the versions that CI has; with another one, the newest that fit pyproject.toml.
PIN := $(shell $(PYTHON) -c 'import sys; print("--constraint constraints.txt --build-constraint constraints.txt" * (sys.version_info[:2] == (3, 11)))')
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --prefer-binary
SOURCES := src tests examples docs

.DEFAULT_GOAL := help
.PHONY: help train test lint types check format docs site wheel clean

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

$(BIN)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "evenstep needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade 'pip>=25.3'
	@touch $@

$(BIN)/.installed: $(BIN)/.made pyproject.toml constraints.txt
	@echo "installing evenstep and PyTorch into $(VENV); the first time takes minutes"
	$(INSTALL) $(PIN) --editable .
	@touch $@

$(BIN)/.dev: $(BIN)/.installed
	$(INSTALL) $(PIN) --group dev
	@touch $@

# CIFAR-10 if it is in ./data or can be downloaded, else the built-in digits; the first lines say which.
train: $(BIN)/.installed
	$(BIN)/evenstep train --data auto --batch-size 64 --optimizer adam --lr-schedule cosine $(ARGS)

test: $(BIN)/.dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(BIN)/.dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types: $(BIN)/.dev
	$(BIN)/mypy
	cd src/evenstep/starter && $(abspath $(BIN))/mypy --strict --explicit-package-bases *.py

check: lint types test

format: $(BIN)/.dev
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# docs/cli.md, from the help texts of the command, and the tree of modules in the README.
docs: $(BIN)/.installed
	$(BIN)/python docs/generate.py

$(BIN)/.docs: $(BIN)/.installed
	$(INSTALL) $(PIN) --group docs
	@touch $@

# A warning is an error, and so is a page that would load something from the network.
site: $(BIN)/.docs
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs site

wheel: $(BIN)/.dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
