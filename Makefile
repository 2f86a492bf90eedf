# Two commands: `make train` shows the main job, `make test` proves it. Both set everything up.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: train test zoo lint bench bench-compile learn rules docs clean

train: $(READY)
	$(RUN) scripts/train.py

test: $(READY)
	$(RUN) -m ruff check src tests scripts benchmarks experiments
	$(RUN) -m ruff format --check src tests scripts benchmarks experiments
	JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist worksteal

zoo: $(READY)
	ZOO=all JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist worksteal tests/test_engine.py

lint: $(READY)
	$(RUN) -m ruff check --fix src tests scripts benchmarks experiments
	$(RUN) -m ruff format src tests scripts benchmarks experiments
	$(RUN) -m mypy

bench: $(READY)
	$(RUN) benchmarks/run.py $(ARGS)

learn: $(READY)
	$(RUN) experiments/learning.py $(ARGS)

rules: $(READY)
	$(RUN) experiments/rules.py

docs: $(READY)
	$(RUN) -m pip install --quiet --editable '.[docs]'
	JAX_PLATFORMS=cpu $(RUN) -m mkdocs build --strict

bench-compile: $(READY)
	JAX_PLATFORMS=cpu $(RUN) benchmarks/compile_time.py

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-peer out site
