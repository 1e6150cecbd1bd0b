# Two commands on a fresh machine with git, make and Python with pip: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin
SOAK_SECONDS ?= inf
SOAK_START ?= 0

.PHONY: demo test slow soak lint types clean docs

demo: .venv/installed
	@$(BIN)/fourfold demo

test slow: export PYTHONDONTWRITEBYTECODE =
test: lint types
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

# what CI runs as well: pages followed literally, the site in a browser, examples, benchmarks, faults between nodes
slow: .venv/installed
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m slow

# all cases of all tests, pages in a shell, the package in an empty environment, the tour, families of transformers and
# convolutional networks on many grids, models and loops as people write them, operations on parts in every way, checkpoints between every pair of grids, faults of
# every kind at every phase of a run, a hundred
# killed ranks, runs that are watched without faults and with (these need root), overlap bit
# for bit over 20 steps, pipelines, contexts and folds on every small grid, dry runs of the largest models, reports of a million steps, loss curves of 200 steps, then every
# grid with every combination of options, for days; SOAK_SECONDS=N stops these after about that long
soak: .venv/installed
	FOURFOLD_TEST_ALL=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m 'slow or not slow'
	$(BIN)/python tests/pages.py --shell README.md docs/*.md
	$(BIN)/python tests/soak_package.py
	$(BIN)/python tests/commands/soak_demo.py
	$(BIN)/python tests/wrap/soak_families.py
	$(BIN)/python tests/wrap/soak_images.py
	$(BIN)/python tests/wrap/soak_people.py
	$(BIN)/python tests/wrap/soak_operations.py
	$(BIN)/python tests/checkpoint/soak_checkpoint.py
	$(BIN)/python tests/train/soak_faults.py
	$(BIN)/python tests/watch/soak_kills.py
	$(BIN)/python tests/watch/soak_watch.py clean
	$(BIN)/python tests/watch/soak_watch.py start
	$(BIN)/python tests/watch/soak_watch.py faults
	$(BIN)/python tests/core/soak_overlap.py
	$(BIN)/python tests/pipeline/soak_pipeline.py
	$(BIN)/python tests/context/soak_context.py
	$(BIN)/python tests/nn/soak_fold.py
	$(BIN)/python tests/planner/soak_dry.py
	$(BIN)/python tests/report/soak_report.py
	$(BIN)/python tests/train/soak_curves.py
	SOAK_SECONDS=$(SOAK_SECONDS) SOAK_START=$(SOAK_START) $(BIN)/python tests/core/soak.py

# the documentation as a site in site/, warnings as errors (with --quiet mkdocs does not count them)
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

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
