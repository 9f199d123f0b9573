# `make demo` and `make test` do all the set-up they need, in .venv; the second time it is there.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test study bench calm estimators draws head gate transport rival serve lint format docs clean

demo: $(READY)
	@$(BIN)/opdflow demo $(ARGS)

serve: $(READY)
	@$(BIN)/opdflow serve $(ARGS)

test: lint
	@$(BIN)/python -m pytest

study: $(READY)
	@$(BIN)/opdflow study $(ARGS)

bench: $(READY)
	@for tier in remote pools shared; do $(BIN)/opdflow bench --tier $$tier $(ARGS) || exit 1; done

calm: $(READY)
	@$(BIN)/python benchmarks/calm.py $(ARGS)

estimators: $(READY)
	@$(BIN)/python benchmarks/estimators.py $(ARGS)

draws: $(READY)
	@$(BIN)/python benchmarks/draws.py $(ARGS)

head: $(READY)
	@$(BIN)/python benchmarks/head.py $(ARGS)

gate: $(READY)
	@$(BIN)/python benchmarks/gate.py $(ARGS)

transport: $(READY)
	@$(BIN)/python benchmarks/transport.py $(ARGS)

# TRL and what it needs beyond ours, in a folder that only its own process sees.
rival: $(READY)
	@test -d .opdflow/rival/trl || $(BIN)/python -m pip install --quiet --no-deps --target .opdflow/rival trl datasets xxhash multiprocess dill pyyaml accelerate
	@$(BIN)/python benchmarks/rival.py $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo > .venv/imports.log || { cat .venv/imports.log; exit 1; }

format: $(READY)
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

docs: $(READY)
	@$(BIN)/python -m flows.reference

clean:
	rm -rf .venv

$(READY): pyproject.toml install.sh
	@bash install.sh $(PYTHON)
	@touch $(READY)
