# `make run` starts Rooms, `make test` runs every test; `make help` lists the rest.

PYTHON ?= python3
EXTRAS ?= dev,full,spark
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest
# The whole suite waits for servers more than it works: it runs in several processes, each with servers of its own.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help run run-full full-up full-down setup test lint types unit contract faults e2e attack chaos bench docs clean

help: ## List every target
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.base ## Start everything on this machine (ROOMS_LISTEN, ROOMS_DATA move it)
	@$(BIN)/python -m rooms dev

run-full: setup ## The same on Artemis and ZooKeeper, started here too; needs Java 17 or later, and Maven
	@$(BIN)/python -m rooms full run

full-up: setup ## Start PostgreSQL, Artemis and ZooKeeper and leave them running; ROOMS_DATA/full.env names them
	@$(BIN)/python -m rooms full up

full-down: setup ## Stop what full-up started; its data stays
	@$(BIN)/python -m rooms full down

setup: $(VENV)/.extras $(VENV)/.classes ## Make .venv with every extra

test: setup ## Run the whole test-suite, in WORKERS processes
	$(PYTEST) -n $(WORKERS) --dist loadfile tests

lint: setup ## ruff, mypy --strict and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

types: setup ## mypy --strict alone
	$(BIN)/mypy

unit: setup ## Tests of pure decisions and small parts
	$(PYTEST) tests/unit

contract: setup ## Every adapter against the contract of its port
	$(PYTEST) tests/contract

faults: setup ## Kills, crashes and full disks
	$(PYTEST) tests/faults

e2e: setup ## The whole service from outside
	$(PYTEST) tests/e2e

chaos: setup ## Random faults under load with accounting from outside, for MINUTES (10) in all, in both shapes
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),10)

attack: setup ## Seeded attacks on everything that takes input from outside, for SECONDS (60) in all
	$(BIN)/python -m tests.faults.hostile --seconds $(or $(SECONDS),60)

bench: setup ## Measure everything; BENCH="S1 --quick" a part of it, BENCH=--help tells what there is
	$(BIN)/python -m tests.bench $(BENCH)

docs: setup ## Run every command that README.md shows
	$(PYTEST) tests/e2e/test_readme.py

clean: ## Remove .venv and caches; .rooms stays, it holds messages
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Rooms needs Python 3.11 or later, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "Name one, for example: make run PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "Python's venv module is not complete. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what Rooms needs into $(VENV); this happens once."
	@$(PIP) --editable .
	@touch $@

$(VENV)/.extras: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Rooms and every extra into $(VENV)."
	@$(PIP) --editable '.[$(EXTRAS)]'
	@touch $(VENV)/.base $@

# Spark starts sooner with it, and as well without.
$(VENV)/.classes: $(VENV)/.extras
	@echo "Making an archive of Java's classes for Spark; this takes about a minute, once."
	@$(BIN)/python -m delivery.correlation.archive || true
	@touch $@
