# Every target sets up what it needs in .venv: Python 3.11 or newer and make are enough.
#   make verify     hold the correct example against the reference, then see a broken one named
#   make test       the test suite
#   make perturb    the numerical tests with products rounded as another BLAS might, SEED=1
#   make test-lowest  a part of the tests with the lowest versions that pyproject.toml allows
#   make fuzz       drawn calls of every mechanism, CASES=2000 SEED=<the time>

PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python,\
	$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One BLAS thread for each test process: more only get in each other's way.
PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/python -P -m pytest
WORKERS ?= auto

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help verify test fuzz calibrate mutation-score lint format typecheck docs bench wheel clean

help:
	@echo "make verify | test | fuzz | calibrate | mutation-score | lint | format | typecheck | docs | bench | wheel | clean"

# ---- environment: a stamp for each set of extras, renewed when the metadata changes

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "refattn needs Python 3.11 or newer; none was found on PATH (name one: make PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make a virtual environment: its ensurepip is missing (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

INSTALL = $(PIP) install -q -e "$(strip $(1))" && touch $@
METADATA := pyproject.toml setup.py

$(VENV)/.ready: $(METADATA) | $(BIN)/python
	$(call INSTALL,.)
$(VENV)/.ready-%: $(METADATA) | $(BIN)/python
	$(call INSTALL,.[$*])

# ---- the two commands of the README

MECHANISM := --mechanism scaled_dot_product_attention
CORRECT := examples/online_softmax.py:attention
CORRECT_BACKWARD := examples/online_softmax.py:attention_backward
BROKEN := examples/broken/causal_upper_left.py:attention
BROKEN_CLASS := causal_other

verify: $(VENV)/.ready
	$(BIN)/refattn verify $(CORRECT) --backward $(CORRECT_BACKWARD) --gradients $(MECHANISM)
	@echo
	@echo "The same for a kernel with a mistake: the verdict must be a mismatch (exit 1) explained by $(BROKEN_CLASS)."
	$(BIN)/refattn verify $(BROKEN) $(MECHANISM) > $(VENV)/broken.txt; status=$$?; cat $(VENV)/broken.txt; \
	  test $$status -eq 1 && grep -q $(BROKEN_CLASS) $(VENV)/broken.txt

test: $(VENV)/.ready-test
	$(PYTEST) -n $(WORKERS) --maxprocesses 8
	@echo "Numba-CUDA kernels on the simulator (chosen by the environment before numba is imported, hence a process of its own)"
	NUMBA_ENABLE_CUDASIM=1 $(PYTEST) tests/backends/test_numba_cuda.py

# Both ask the numbers alone: what products and older libraries may change.
NUMBERS := tests/contract/test_numbers.py tests/contract/test_gradients.py tests/contract/test_arrays.py
perturb: $(VENV)/.ready-test
	$(PYTEST) -n $(WORKERS) --maxprocesses 8 $(NUMBERS) tests/contract/test_special_values.py tests/attention tests/test_memory.py \
	  tests/test_layers.py tests/test_positions.py tests/test_routing.py tests/test_normalization.py --perturb $(or $(SEED),1)

LOWEST := $(VENV)-lowest
test-lowest: $(METADATA) | $(BIN)/python
	$(PYTHON) -m venv $(LOWEST)
	$(BIN)/python .ci/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install -q -c $(LOWEST)/constraints.txt -e ".[test]"
	OPENBLAS_NUM_THREADS=1 $(LOWEST)/bin/python -P -m pytest -q -n $(WORKERS) --maxprocesses 8 $(NUMBERS) tests/test_arrays.py \
	  tests/test_contraction.py tests/test_normalization.py tests/test_positions.py tests/precision tests/test_memory.py tests/backends/test_backends.py

CASES ?= 2000
fuzz: $(VENV)/.ready-test
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -P tests/fuzz/run.py --cases $(CASES) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

# ---- everything else

lint: $(VENV)/.ready-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.ready-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The installed tree is checked: in the checkout, refattn.backends does not lie inside refattn/.
typecheck: $(VENV)/.ready-lint
	rm -rf build/typecheck
	$(PIP) install -q --no-deps --target build/typecheck .
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p refattn

docs: $(VENV)/.ready-docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# The thresholds of the verdict, measured on right kernels: twenty seeds, about ten minutes; the docs show the table.
calibrate: $(VENV)/.ready-test
	OPENBLAS_NUM_THREADS=1 $(BIN)/python tests/verification/calibrate.py -o docs/tolerances_table.md

# Every mistake of the catalogues made and looked for: about two hours, less with MECHANISM=linear_attention or SAMPLE=10;
# LIFTED=-1 takes all that a mechanism shares with the one it is built on.
mutation-score: $(VENV)/.ready-test
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -P tests/verification/mutation_score.py --jobs $(or $(JOBS),2) $(if $(MECHANISM),--mechanism $(MECHANISM)) \
	  $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(LIFTED),--lifted $(LIFTED)) $(if $(MECHANISM)$(SAMPLE),,-o docs/mutation_score_table.md)

# What is committed is measured (`make bench ASV="run --quick"` is shorter); `asv publish` makes the pages.
ASV ?= run
bench: $(VENV)/.ready-bench
	$(BIN)/asv machine --yes
	OPENBLAS_NUM_THREADS=1 $(BIN)/asv $(ASV) --python=same --set-commit-hash $$(git rev-parse HEAD)

wheel: $(BIN)/python
	rm -rf build/lib dist
	$(PIP) wheel -q --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(VENV)-lowest build dist docs/_build .asv *.egg-info .pytest_cache .ruff_cache .mypy_cache
