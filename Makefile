# Few verbs. `make run` and `make test` need nothing but Python 3.11 and the network's package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA ?= penstock-data
LISTEN ?= 127.0.0.1:9092
# The commands' own default need not be said.
BOOTSTRAP := $(if $(filter 127.0.0.1:9092,$(LISTEN)),, --bootstrap $(LISTEN))

.PHONY: help run test lint types contracts check chaos bench clean

help:
	@echo "make run        a local cluster on $(LISTEN), until Ctrl-C (data in ./$(DATA))"
	@echo "make test       set up and run the whole test suite"
	@echo "make check      lint, types and import contracts"
	@echo "make chaos      the crash tests, longer"
	@echo "make bench      the benchmarks"
	@echo "make clean      remove what make made (not your data)"

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; name one with: make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing penstock and its test tools into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

run: $(VENV)/.installed
	@echo "Starting a local cluster. When it is ready, in other terminals:"
	@echo
	@echo "    echo 'hello, world' | $(BIN)/penstock produce greetings$(BOOTSTRAP)"
	@echo "    $(BIN)/penstock consume greetings --from beginning$(BOOTSTRAP)"
	@echo
	@echo "or any Kafka client with bootstrap.servers=$(LISTEN). Ctrl-C stops it; the data stays in ./$(DATA)."
	@echo
	@exec $(BIN)/penstock serve --listen $(LISTEN) --data-dir $(DATA)

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

contracts: $(VENV)/.installed
	$(BIN)/lint-imports

check: lint types contracts

chaos: $(VENV)/.installed
	PENSTOCK_CHAOS_SECONDS=$${PENSTOCK_CHAOS_SECONDS:-600} \
	PENSTOCK_CHAOS_SEED=$${PENSTOCK_CHAOS_SEED:-random} $(BIN)/python -m pytest tests/chaos -m chaos -s --timeout 3600

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
