# Two commands on a fresh machine with git, make and Python with pip: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin
GRID ?= x=2,z=2
SOAK_SECONDS ?= inf
SOAK_START ?= 0

.PHONY: demo test soak lint types clean

demo: .venv/installed
	@$(BIN)/python examples/demo.py --grid $(GRID)

test: lint types
	$(BIN)/python -m pytest

# every grid with every combination of options, for days; SOAK_SECONDS=N stops after about that long
soak: .venv/installed
	SOAK_SECONDS=$(SOAK_SECONDS) SOAK_START=$(SOAK_START) $(BIN)/python tests/soak.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: .venv/installed
	$(BIN)/pyrefly check

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info
