# make train | test: nothing but python3 (>= 3.10, with venv and headers), make and a C++ compiler is needed beforehand.
# Variables: PYTHON (python3), VENV (.venv), ARGS (added to the command that runs), NPROC (ranks of `make train`),
# NAME (the benchmark of `make bench`; `python -m benchmarks` lists them),
# PIP_ARGS (added to pip install, e.g. an --extra-index-url that has CPU-only wheels of torch),
# PYTEST (pytest; CI's is tests.again, which runs what fails once more),
# CUDA_TORCH, CUDA_VENV (the torch of `make test-cuda`, and its environment).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CPU_ADAM := torch_extensions/cpu_adam/cpu_adam.so
DOCS_INSTALLED := $(VENV)/.installed-docs
ARGS ?=
NPROC ?=
PIP_ARGS ?=
PYTEST ?= pytest
CUDA_TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
CUDA_VENV ?= .venv-cuda
CUDA_BIN := $(CUDA_VENV)/bin
CUDA_INSTALLED := $(CUDA_VENV)/.installed-$(CUDA_TORCH)
# Not from the environment: some systems have the host's name there.
NAME := all

.PHONY: help install train test test-slow test-touched test-release test-cuda bench bench-gpu lint format typecheck docs ci clean distclean
.DELETE_ON_ERROR:

help:
	@echo 'make train      run configs/quickstart.yaml on every GPU, else on 2 CPU ranks'
	@echo 'make test       run the test suite (test-slow: what CI runs beyond it; test-release: everything that is long)'
	@echo 'make test-cuda  run the tests that need GPUs, on emulated ones (once: 5 GB into $(CUDA_VENV))'
	@echo 'make bench      run NAME=a benchmark; without it all that need no GPU, then render docs/benchmarks.md'
	@echo 'make bench-gpu  what only a GPU shows (docs/gpu.md)'
	@echo 'make lint       ruff, lint and format check (format: apply)'
	@echo 'make typecheck  mypy, strict'
	@echo 'make docs       build the site into build/docs; a broken link is an error'
	@echo 'make ci         what CI runs'
	@echo 'make clean      delete build products and caches (distclean: $(VENV) and $(CUDA_VENV) too)'

install: $(INSTALLED) $(VENV)/$(CPU_ADAM)

define check_python
	@command -v $(PYTHON) >/dev/null || { \
	  echo 'error: $(PYTHON) was not found'; echo '  fix: install Python 3.10 or later, or pass PYTHON=/path/to/python3'; exit 2; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: shardkit needs Python 3.10 or later, $(PYTHON) is $$($(PYTHON) --version 2>&1)"; \
	  echo '  fix: install a later one, or pass PYTHON=/path/to/python3.10'; exit 2; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo 'error: $(PYTHON) cannot make virtual environments'; echo '  fix: apt-get install python3-venv'; exit 2; } >&2
endef

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(check_python)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo 'creating $(VENV)'; $(PYTHON) -m venv --clear $(VENV); }
	@echo 'installing into $(VENV) (once; torch is large, this takes minutes)'
	@# A pip that builds DeepSpeed in isolation: beside a CUDA torch, its setup.py would ask for nvcc.
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.3'
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt torch
	@# setuptools warns about every editable install.
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[test,dev,hf,finetune,vision]'
	@touch $@

# Tests of offloading would compile it: two minutes of CPU time, once. Without a compiler they say so.
$(VENV)/$(CPU_ADAM): $(INSTALLED)
	@echo 'compiling DeepSpeedCPUAdam into $(VENV) (once)'
	-@unset TORCH_EXTENSIONS_DIR; $(BIN)/python -m tests.zero_ops && touch -c $@

# run.overwrite: an earlier run in the same directory would otherwise be refused.
train: $(INSTALLED)
	@set -e; \
	nproc='$(NPROC)'; [ -n "$$nproc" ] || nproc=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)'); \
	OMP_NUM_THREADS=$$($(BIN)/python -c "from shardkit.launch.ranks.affinity import default_omp_threads as t; print(t($$nproc))"); \
	export OMP_NUM_THREADS; \
	set -x; \
	$(BIN)/torchrun --standalone --nproc-per-node $$nproc -m shardkit.train --config configs/quickstart.yaml run.overwrite=true $(ARGS)

# Files of tests side by side, three for two cores, as some wait (tests/conftest.py).
test: $(INSTALLED) $(VENV)/$(CPU_ADAM)
	$(BIN)/python -m $(PYTEST) -n logical --maxprocesses 4 $(ARGS)

test-slow: $(INSTALLED) $(VENV)/$(CPU_ADAM)
	$(BIN)/python -m $(PYTEST) -m slow $(ARGS)

# ARGS='--touched-since main' leaves those that cover a changed file (tests/touched.py).
test-touched: $(INSTALLED)
	$(BIN)/python -m $(PYTEST) -m 'release and covers' $(ARGS) || [ $$? = 5 ]  # 5: no test is touched

# Without an index that has CUDA builds of torch, the tests that need one are skipped.
test-release: $(INSTALLED)
	-$(MAKE) $(CUDA_INSTALLED)
	$(BIN)/python -m $(PYTEST) -m 'slow or release' $(ARGS)

# The real CUDA build of torch over an emulated GPU: tests/emulated_cuda/README.md.
# ARGS='-m "(gpu or multigpu) and slow"' runs the long ones.
test-cuda: $(CUDA_INSTALLED)
	@# Every time, as its sources may have changed; what did not is not compiled again.
	$(CUDA_BIN)/python -m tests.emulated_cuda.build
	@# Once, minutes: a test's time limit has no room for it.
	EMUCUDA=1 $(CUDA_BIN)/python -m tests.zero_ops
	EMUCUDA=1 EMUCUDA_DEVICES=$${EMUCUDA_DEVICES:-4} \
	  $(CUDA_BIN)/python -m $(PYTEST) -m '(gpu or multigpu) and not slow and not release' $(ARGS) || [ $$? = 5 ]  # 5: no test is touched

# The package index's own wheel of torch is the CUDA one; settings of pip may prefer another.
$(CUDA_INSTALLED): export PIP_CONFIG_FILE := /dev/null
$(CUDA_INSTALLED): export PIP_FIND_LINKS :=
$(CUDA_INSTALLED): export PIP_EXTRA_INDEX_URL :=
$(CUDA_INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(check_python)
	@$(CUDA_BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo 'creating $(CUDA_VENV)'; $(PYTHON) -m venv --clear $(CUDA_VENV); }
	@echo 'installing torch $(CUDA_TORCH) for CUDA into $(CUDA_VENV) (once; 5 GB)'
	@rm -f $(CUDA_VENV)/.installed-*
	@{ grep -v '^torch==' constraints.txt; echo 'torch==$(CUDA_TORCH)'; } >$(CUDA_VENV)/constraints.txt
	$(CUDA_BIN)/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.3'
	@$(CUDA_BIN)/python -m pip install -q -c $(CUDA_VENV)/constraints.txt torch && \
	ls $(CUDA_VENV)/lib/python3*/site-packages/nvidia/*/lib/libcudart.so.* >/dev/null 2>&1 || { \
	  echo 'error: the package index has no CUDA build of torch $(CUDA_TORCH) for this Python and machine'; \
	  echo '  fix: name an index that has one (PIP_INDEX_URL), or a release that it has (CUDA_TORCH)'; exit 2; } >&2
	PYTHONWARNINGS=ignore $(CUDA_BIN)/python -m pip install -q -c $(CUDA_VENV)/constraints.txt -e '.[test,hf,finetune,vision]'
	@touch $@

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks $(NAME) $(ARGS)

# Nothing is installed here: the machine with the GPU may have no network. Without $(VENV) it runs PYTHON.
bench-gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks gpu $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(INSTALLED)
	$(BIN)/mypy -p shardkit

# -n would ask for a page behind every type in a signature, the other libraries' too.
docs: $(DOCS_INSTALLED)
	$(BIN)/sphinx-build -W --keep-going -q -c docs -d build/docs-cache . build/docs $(ARGS)
	@echo 'build/docs/index.html'

$(DOCS_INSTALLED): $(INSTALLED)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: the site's generator (Sphinx) needs Python 3.11 or later, $(VENV) has $$($(BIN)/python --version)"; \
	  echo '  fix: make docs PYTHON=/path/to/python3.11 VENV=.venv-docs'; exit 2; } >&2
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	@touch $@

ci:
	bash .ci/run

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -path ./$(CUDA_VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(CUDA_VENV) benchmarks/.venv-*
