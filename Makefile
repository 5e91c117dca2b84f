# `make demo` and `make test` are all the set-up there is: each makes .venv when it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
# One thread per test process: the suite runs one process per core.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test test-slow test-fuzz test-newest lint format docs bench clean

demo: .venv/installed
	$(BIN)/metaphrase demo $(ARGS)

test: .venv/installed
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow" -n auto --dist loadfile $(ARGS)

test-slow: .venv/installed
	$(TEST_ENV) $(BIN)/python -m pytest -m slow $(ARGS)

# Broken recipes, texts, options and model folders. It takes up to 20 minutes.
test-fuzz: .venv/installed
	$(BIN)/python tests/fuzz/run.py $(ARGS)

# The newest releases in place of constraints.txt. torch stays: a looser request may pull the build for GPUs, of several GB.
test-newest:
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --editable ".[dev]" torch==2.13.0
	$(TEST_ENV) .venv-newest/bin/python -m pytest -m "not slow" -n auto --dist loadfile $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/prose.py

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Warnings are errors. -E reads every page again, since the code that tables are made from may have changed.
docs: .venv/installed
	$(BIN)/python -m sphinx -EW --keep-going -q docs build/docs

bench: .venv/installed
	$(BIN)/python benchmarks/training.py $(ARGS)

clean:
	rm -rf .venv .venv-newest build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
