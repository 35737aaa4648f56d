# Every target prepares .venv by itself; only python3 (3.11 or later) and, for the fast kernels, a C++ compiler are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TORCH_VERSION := $(shell sed -n 's/^ *"torch==\([^"]*\)".*/\1/p' pyproject.toml)
TORCH := $(VENV)/.torch-$(TORCH_VERSION)
READY := $(VENV)/.installed
AT_ONCE ?= 2# tests that run at the same time
NATIVE := pyproject.toml CMakeLists.txt $(wildcard csrc/*)

.DEFAULT_GOAL := help
.PHONY: help install demo docs test test-sanitize test-arm fuzz lint bench bench-peers gpu-check train-tiny clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  make %-14s %s\n", $$1, $$2}'

# torch comes first and alone: a range, or torch together with others, may pull the CUDA build.
$(TORCH):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or later; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch $(TORCH_VERSION)"
	@$(PIP) torch==$(TORCH_VERSION)
	@touch $@

$(READY): $(TORCH) $(NATIVE)
	@echo "installing headrace (and building its kernels)"
	@$(PIP) --editable '.[dev]'
	@touch $@

install: $(READY) ## .venv with headrace, its dependencies and its kernels

demo: $(READY) ## answer real requests on the shipped model and show what the cache saved
	@$(BIN)/python -m headrace.cli.main demo

test: $(READY) ## all tests
	@$(BIN)/python -m pytest -n $(AT_ONCE) -p tests.scheduling

test-sanitize: $(READY) ## kernel tests under the address, undefined-behaviour and thread sanitizers (GCC)
	@$(BIN)/python tools/sanitize/run.py

test-arm: $(READY) ## kernel tests on kernels built for 64-bit ARM, emulated (Debian; an hour)
	@$(BIN)/python tools/arm/run.py

fuzz: $(READY) ## attack every door with seeded nonsense (5 minutes; FUZZ_SECONDS=60 FUZZ_SEED=2 for others)
	@$(BIN)/python -m tools.fuzz.run --seconds $(or $(FUZZ_SECONDS),300) --seed $(or $(FUZZ_SEED),1)

lint: $(READY) ## ruff (rules and format) and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# The site takes the Python interface from src/ as text: its packages alone are enough, beside headrace's own.
$(READY)-docs: $(READY) pyproject.toml
	@echo "installing what builds the documentation"
	@$(PIP) $$($(BIN)/python -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

docs: $(READY)-docs ## the documentation site, into build/docs; links are checked, pages load nothing from elsewhere
	@NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mkdocs build --strict
	@echo "build/docs/index.html"

bench: $(READY) ## benchmarks of this machine (some minutes; nothing else should run)
	@mkdir -p build/bench
	@$(BIN)/headrace bench cache --json build/bench/cache.json
	@$(BIN)/headrace bench attention --json build/bench/attention.json
	@$(BIN)/headrace bench engine --json build/bench/engine.json

bench-peers: $(READY) ## other engines, each in its own environment, on the same work in turns (an hour and more)
	@PYTHON=$(PYTHON) tools/bench_peers/install.sh
	@mkdir -p build/bench
	@$(BIN)/headrace bench engine --engine all --models S1,S2 --json build/bench/peers.json

gpu-check: $(READY) ## tests that need a CUDA device
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(BIN)/python -m pytest tests/gpu; else echo "no CUDA device"; fi

train-tiny: $(READY) ## train the shipped model again
	@$(BIN)/python tools/train_tiny/train.py

clean: ## remove .venv, the built kernels and caches
	rm -rf $(VENV) build/arm build/cmake build/docs build/sanitize dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f src/headrace/kernels/*.so src/headrace/kernels/_unbuilt.txt
	find src tests tools bench -name __pycache__ -type d -prune -exec rm -rf {} +
