# `make run` starts Rooms, `make test` runs every test; `make help` lists the rest.

PYTHON ?= python3
EXTRAS ?= dev,full,spark
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Where PYTHONDONTWRITEBYTECODE is set, each process of a run would rewrite the asserts of all tests,
# and each process that starts would compile its modules.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
COMPILE := $(BIN)/python -m compileall -q
# Tests mostly wait for servers, so they run in several processes, each with its own servers.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help run run-full full-up full-down setup test lint types unit integration contract faults e2e attack chaos bench docs docs-commands clean

help: ## List every target
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.base ## Start everything on this machine (ROOMS_LISTEN, ROOMS_DATA move it)
	@$(BIN)/python -m rooms dev

run-full: setup ## The same on Artemis and ZooKeeper; needs a JDK 17 or later, and Maven
	@$(BIN)/python -m rooms full run

full-up: setup ## Start PostgreSQL, Artemis and ZooKeeper in the background; ROOMS_DATA/full.env has their URLs
	@$(BIN)/python -m rooms full up

full-down: setup ## Stop the servers of full-up; their data stays
	@$(BIN)/python -m rooms full down

setup: $(VENV)/.extras ## Make .venv with every extra
	@$(COMPILE) rooms delivery migrations tests

test: setup ## Run the whole test-suite, in WORKERS processes
	$(PYTEST) -n $(WORKERS) --dist loadfile tests

lint: setup ## ruff, mypy --strict, import-linter, and the checks of prose, class names and commit subjects
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.support.prose
	$(BIN)/python -m tests.support.class_names
	$(BIN)/python -m tests.support.commit_subjects

types: setup ## mypy --strict only
	$(BIN)/mypy

unit: setup ## Tests of pure decisions and small parts
	$(PYTEST) tests/unit

integration: setup ## Tests of parts on real servers
	$(PYTEST) tests/integration

contract: setup ## Every adapter against the contract of its port
	$(PYTEST) tests/contract

faults: setup ## Kills, crashes and full disks
	$(PYTEST) tests/faults

e2e: setup ## The whole service from outside
	$(PYTEST) tests/e2e

chaos: setup ## Random faults under load, for MINUTES (10), on PostgreSQL and on Artemis
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),10)

attack: setup ## Seeded attacks on every input, for SECONDS (60)
	$(BIN)/python -m tests.faults.hostile --seconds $(or $(SECONDS),60)

bench: setup ## Measure everything; BENCH="S1 --quick" a part of it, BENCH=--help lists the scenarios
	$(BIN)/python -m tests.bench $(BENCH)

docs: setup ## Write docs/reference from the code, check links, and build the site into build/site
	$(BIN)/python -m tests.support.reference
	$(PYTEST) -q tests/unit/docs
	$(BIN)/zensical build --strict --clean

docs-commands: setup ## Run every command that README.md and docs/ show
	$(PYTEST) tests/e2e/test_readme.py tests/e2e/test_handlers_page.py tests/e2e/test_docs_commands.py

clean: ## Remove .venv and caches; .rooms, with the messages, stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Rooms needs Python 3.11 or later, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "Name one, for example: make run PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "Python's venv module is not complete. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the dependencies of Rooms into $(VENV), once; about half a minute."
	@$(PIP) --editable .
	@$(COMPILE) rooms delivery migrations
	@touch $@

$(VENV)/.extras: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Rooms and every extra into $(VENV)."
	@$(PIP) --editable '.[$(EXTRAS)]'
	@touch $(VENV)/.base $@
