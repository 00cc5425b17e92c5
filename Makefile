# Few verbs; each sets up what it needs. `make run` needs nothing but Python 3.11 and the package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA ?= penstock-data
PORT ?= 9092
# The commands' own default need not be said.
BOOTSTRAP := $(if $(filter 9092,$(PORT)),, --bootstrap 127.0.0.1:$(PORT))
# Of `make sim-long`.
SEEDS ?= 20000
CLUSTER_SEEDS ?= 2000
# Of `make test`: directories, files or options of pytest; all tests if empty.
TESTS ?=
# Of `make upgrade`.
FROM ?= HEAD~1

.PHONY: help run test lint types contracts check chaos interop-long sim sim-long upgrade spark-long bench wheel clean

help:
	@echo "make run        three brokers on 127.0.0.1:$(PORT) and the ports behind it, until Ctrl-C"
	@echo "                (DATA=DIR for the data, now $(DATA); PORT=N)"
	@echo "make check      lint, types and import contracts"
	@echo "make test       the whole test suite (TESTS=tests/raft for a part of it)"
	@echo "make sim        simulated clusters under faults: a minute of it"
	@echo "make bench      the benchmarks"
	@echo
	@echo "make sim-long   simulations for hours (SEEDS=$(SEEDS) CLUSTER_SEEDS=$(CLUSTER_SEEDS))"
	@echo "make chaos      the tests that kill real brokers, longer (PENSTOCK_CHAOS_SECONDS, PENSTOCK_CHAOS_SEED)"
	@echo "make interop-long transactions, passwords and certificates with the clients that make test leaves out, Kafka's"
	@echo "                kafka-acls and kafka-configs, applications that keep their state in compacted topics"
	@echo "                (Connect, MirrorMaker, faust, quixstreams), a cluster that becomes secure and plain again,"
	@echo "                ten thousand connections to each kind of port"
	@echo "make chaos-transactions"
	@echo "                transactions while brokers and clients are killed, paused and supplanted"
	@echo "                (PENSTOCK_CHAOS_FAULTS=500, PENSTOCK_CHAOS_SEED)"
	@echo "make upgrade    a cluster of an earlier commit upgraded under load (FROM=COMMIT, now $(FROM))"
	@echo "make spark-long archives of ten million records, and twenty kills (PENSTOCK_SPARK_RECORDS, PENSTOCK_SPARK_KILLS)"
	@echo "make wheel      an sdist and a wheel in dist/"
	@echo "make clean      remove what make made (not your data)"

# What an installation is made of: a module with a .pxd beside it is compiled.
COMPILED := $(shell find src -name '*.pxd')
SOURCES := pyproject.toml setup.py src/penstock/__init__.py $(COMPILED) $(COMPILED:.pxd=.py)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; name one with: make PYTHON=python3.11"; exit 1; }
	@echo "making a virtual environment in $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

# The distribution was called penstock before it was called penstock-mq. pip takes the two for different projects:
# an environment with both would lose the command when the old one is uninstalled.
FORGET_OLD_NAME = @if ls -d $(VENV)/lib/python*/site-packages/penstock-*.dist-info >/dev/null 2>&1; then \
	$(BIN)/python -m pip uninstall --quiet --yes penstock; fi; rm -rf src/penstock.egg-info

# Brokers need little; the tests need Spark, and other clients.
$(VENV)/.runs: $(SOURCES) | $(BIN)/python
	@echo "installing penstock and what it needs into $(VENV); this happens once and takes about a minute ..."
	$(FORGET_OLD_NAME)
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --editable .
	@touch $@

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	@echo "installing penstock, Spark and the test tools into $(VENV) ..."
	$(FORGET_OLD_NAME)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(VENV)/.runs $@

run: $(VENV)/.runs
	@echo "Starting a cluster of three brokers. When it is ready, in other terminals:"
	@echo
	@echo "    echo 'hello, world' | $(BIN)/penstock produce greetings$(BOOTSTRAP)"
	@echo "    $(BIN)/penstock consume greetings --from beginning$(BOOTSTRAP)"
	@echo
	@echo "or any Kafka client with bootstrap.servers=127.0.0.1:$(PORT). Kill a broker and watch. Ctrl-C stops"
	@echo "them all; the data stays in $(DATA). For others: make run PORT=N DATA=DIR."
	@echo
	@exec $(BIN)/penstock dev --brokers 3 --data-dir "$(DATA)" --port "$(PORT)"

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(TESTS)

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
	PENSTOCK_CHAOS_SEED=$${PENSTOCK_CHAOS_SEED:-random} $(BIN)/python -m pytest tests/chaos tests/cluster -m chaos -s --timeout 3600

interop-long: $(VENV)/.installed
	$(BIN)/python -m pytest tests/interop tests/cluster tests/cli -m interop_long

chaos-transactions: $(VENV)/.installed
	PENSTOCK_CHAOS_FAULTS=$${PENSTOCK_CHAOS_FAULTS:-500} \
	PENSTOCK_CHAOS_SEED=$${PENSTOCK_CHAOS_SEED:-random} $(BIN)/python -m pytest tests/chaos/test_transactions.py -s

sim: $(VENV)/.installed
	$(BIN)/penstock sim cores --seeds 200
	$(BIN)/penstock sim --seeds 20 --plans 6

sim-long: $(VENV)/.installed
	$(BIN)/penstock sim cores --seeds $(SEEDS) --jobs 2
	$(BIN)/penstock sim --seeds $(CLUSTER_SEEDS) --seconds 60 --plans 6 --jobs 2

upgrade: $(VENV)/.installed
	PENSTOCK_UPGRADE_FROM=$(FROM) $(BIN)/python -m pytest tests/chaos/upgrade.py -s

spark-long: $(VENV)/.installed
	PENSTOCK_SPARK_RECORDS=$${PENSTOCK_SPARK_RECORDS:-10000000} \
	PENSTOCK_SPARK_KILLS=$${PENSTOCK_SPARK_KILLS:-20} $(BIN)/python -m pytest \
		tests/spark/test_archive_kills.py tests/spark/test_archive_executors.py tests/spark/test_table.py -s --timeout 7200

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

# The wheel is built from the sdist, so that nothing gets into it that only this checkout has.
wheel: $(VENV)/.installed
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	@ls -l dist

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .cache
	rm -rf build dist src/*.egg-info
	find src -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
