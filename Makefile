# Two commands: `make demo` trains a language model with ZeRO-3 on two processes, `make test` proves the code.
# Each builds what it needs first (a virtual environment with pinned packages in .venv).

PYTHON ?= python3
TORCH  ?= 2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
CORES  := $(shell getconf _NPROCESSORS_ONLN)
# Processes that run tests; `make test WORKERS=3` measures whether more than cores use waits better.
WORKERS ?= $(CORES)

# Tests start hundreds of processes; each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs figures gpu gpu-wheels memcheck mutants test test-all nightly lint bench env clean
.DEFAULT_GOAL := help

help:
	@grep -E '^# |^[a-z-]+:.*## ' Makefile | sed -E 's/^# ?//; s/:.*## /\t/'

env: $(VENV)/.ready  ## build the virtual environment

# The demo needs a small part of the development environment, which grows from it.
$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@# Python compiles a module when it is first imported; most of these never are.
	$(BIN)/pip install --quiet --no-compile torch==$(TORCH)
	$(BIN)/pip install --quiet --no-compile --editable '.[demo]'
	@touch $@

$(VENV)/.ready: $(VENV)/.demo
	$(BIN)/pip install --quiet --no-compile --editable '.[dev]'
	@touch $@

$(VENV)/.clients: $(VENV)/.ready
	$(BIN)/pip install --quiet --no-compile --editable '.[dev,clients]'
	@touch $@

demo: $(VENV)/.demo  ## train a byte-level GPT with ZeRO-3 on two processes; ARGS="--stage 2 --ranks 3 --steps 1500"
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: env  ## every test but the long ones of `make test-all` and `make nightly`, on one to four real processes
	HYPOTHESIS_PROFILE=short $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not long and not nightly" $(ARGS)

test-all: $(VENV)/.clients  ## the long tests, and the property tests with more examples; the last lines compare times with budgets
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "(long or property) and not nightly" $(ARGS)

nightly: env  ## the property tests, with ten times the examples, the zoo with a new seed, and tests too long for `make test-all`
	seed=$${ZOO_SEED:-$$(date +%s)}; echo "ZOO_SEED=$$seed"; \
	ZOO_SEED=$$seed HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m "property or nightly or long" $(ARGS)
	$(MAKE) memcheck

memcheck: env  ## the tests of `make test` under a malloc that finds stale writes, with NaN in new memory; Inductor's kernels and chosen jobs under others; ARGS="--long" or "--tests tests/storage"
	$(BIN)/python tests/support/memcheck.py $(ARGS)

mutants: env  ## the share of small faults in the core rooms that the tests find: an hour; ARGS="--only finish"
	$(BIN)/python tests/support/mutants.py $(ARGS)

lint: env  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python fzero/deepspeed/stubs.py
	$(BIN)/mypy

docs: env  ## the site, in out/site; `python -m http.server -d out/site` shows it, with its search
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

bench: env  ## fzero against DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed
	$(BIN)/python benchmarks/peers.py $(ARGS)

figures: env  ## the usual sets of figures of docs/performance.md, one after the other, in half an hour; ARGS="--only units" or "--list"
	$(BIN)/python benchmarks/sets.py $(ARGS)

gpu:  ## fzero's laws and speed on a card, in ten minutes, by this machine's own Python; ARGS="--tiny" runs it on a processor
	exec $(PYTHON) benchmarks/gpu.py $(ARGS)

# Wheels are for the machine with the card: GPU_PYTHON is its Python.
GPU_PYTHON ?= 3.12
gpu-wheels:  ## fetch what `make gpu` may miss on a machine without a network, into wheels/ (4 MB)
	rm -rf wheels
	$(PYTHON) -m pip download --quiet --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		--dest wheels optree pydantic hjson
	ls -l wheels

clean:  ## remove what the commands above made
	rm -rf $(VENV) build out *.egg-info
