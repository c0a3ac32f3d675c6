# Tasks for a checkout. Each target installs its dependencies on the first run; later runs start immediately.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check format bench bench-experiments bench-history bench-peers bench-spark \
	bench-storage bench-streams clean python java

COMMA := ,
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TYPED := $(VENV)/typed/headrace
INSTALLED_BENCH := $(VENV)/.installed-bench
SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))
PYTHON ?= $(shell for name in python3.11 python3.12 python3; do \
	"$$name" -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo "$$name"; break; }; done)
JAVA := $(if $(JAVA_HOME),$(JAVA_HOME)/bin/java,java)

help: ## Show this list
	@echo "Headrace: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: java $(INSTALLED) ## Load a year of real flights into a small warehouse under demo/ and query it
	@$(BIN)/headrace demo --dir demo

test: java $(INSTALLED) ## Run the ordinary tests in two processes, one of which has the Spark session
	@$(BIN)/pytest --numprocesses 2 --dist loadfile

test-slow: java $(INSTALLED) ## Run the long tests: crash loops, large data
	@$(BIN)/pytest -m slow --timeout 3600

check: $(INSTALLED) ## Lint, format and type checks
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@mkdir -p $(TYPED) && ln -sfn $(addprefix $(CURDIR)/,storage joins etl pipelines cli samples cli/package/__main__.py) $(TYPED)
	@$(BIN)/mypy

format: $(INSTALLED) ## Format the sources
	@$(BIN)/ruff format

bench: $(INSTALLED_BENCH) ## Measure the joins in under 5 minutes; tables and plots go to artifacts/
	@$(BIN)/python -m benchmarks joins

bench-experiments: $(INSTALLED_BENCH) ## Repeat the SSIJ paper's experiments on a simulated disk, write docs/experiments.md
	@$(BIN)/python -m benchmarks experiments

bench-streams: $(INSTALLED_BENCH) ## Repeat the papers' experiments with joins of streams, write docs/experiments-streams.md
	@$(BIN)/python -m benchmarks streams

bench-spark: java $(INSTALLED_BENCH) ## Measure a Spark micro-batch against Spark's own join
	@$(BIN)/python -m benchmarks spark

bench-history: java $(INSTALLED_BENCH) ## Measure dimensions with history against Spark and MERGE; CASES="restate" selects cases
	@$(BIN)/python -m benchmarks history $(CASES)

bench-storage: $(INSTALLED_BENCH) ## Measure loads, changes and commits against DuckDB, SQLite and LMDB
	@$(BIN)/python -m benchmarks storage

bench-peers: java $(INSTALLED_BENCH) ## Compare SSIJ with its peers in equal memory; CASES="large-zipf ..." selects cases
	@$(BIN)/python -m benchmarks peers $(or $(CASES),all)

clean: ## Remove the output of demo, tests, benchmarks and the README's examples; keep the environment and mine/
	@rm -rf demo joined.parquet planes.tbl* quotes.tbl* orders shop.db artifacts build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

python:
	@[[ -x $(BIN)/python || -n "$(PYTHON)" ]] || { echo "headrace: Python 3.11 or 3.12 with its venv module is missing;" \
		"install it (Debian, Ubuntu: apt install python3.11-venv; macOS: brew install python@3.11) and run make again" >&2; exit 1; }

java: python
	@version=$$("$(JAVA)" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1) || true; \
	(( $${version:-0} >= 17 )) || { echo "headrace: Java 17 or newer is missing (found: $${version:-none}); install it" \
		"(Debian, Ubuntu: apt install openjdk-17-jre-headless; macOS: brew install openjdk@17) or set JAVA_HOME" >&2; exit 1; }

$(BIN)/python: | python
	@echo "headrace: making $(VENV) with $(PYTHON)" >&2
	@"$(PYTHON)" -m venv $(VENV)

define install
	@echo "headrace: installing $(1) into $(VENV) (log: $(VENV)/install.log)" >&2
	@$(BIN)/python -m pip install --disable-pip-version-check --editable "$(1)" >$(VENV)/install.log 2>&1 || { tail -n 3 $(VENV)/install.log >&2; \
		echo "headrace: the installation failed; if the network was away, run make again once it is back" >&2; exit 1; }
	@touch $@
endef

$(INSTALLED): pyproject.toml | $(BIN)/python
	$(call install,.[test])

$(INSTALLED_BENCH): pyproject.toml | $(INSTALLED)
	$(call install,.[test$(COMMA)bench])
