# Two commands: `make train` shows the main job, `make test` proves it. Both set everything up.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: train test zoo conformance fuzz operations models versions browser lint bench bench-compile learn rules docs clean

train: $(READY)
	$(VENV)/bin/braintrace train evidence

test: $(READY)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist worksteal

zoo: $(READY)
	ZOO=all JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist worksteal $(addprefix tests/test_,zoo.py learner.py engine.py exactness.py rules.py gradients.py masking.py types.py functions.py flax.py equinox.py)

conformance: $(READY)  # every rule on every model, for hours; RULE=rtrl: by one rule
	ZOO=all RULE=$(RULE) JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist worksteal tests/test_conformance.py

browser: $(READY)
	JAX_PLATFORMS=cpu $(RUN) scripts/browser.py $(ARGS)

fuzz: $(READY)  # 10,000 random programs; any part of the seeds may be run alone
	SEEDS=$(or $(SEEDS),0:100) PROGRAMS=$(or $(PROGRAMS),100) JAX_PLATFORMS=cpu $(RUN) -m pytest tests/test_random_programs.py

operations: $(READY)
	$(RUN) scripts/operations.py
	OPERATIONS=all JAX_PLATFORMS=cpu $(RUN) -m pytest tests/test_operations.py

models: $(READY)
	JAX_PLATFORMS=cpu $(RUN) scripts/any_model.py

versions: $(READY)  # the lowest and the newest versions; ARGS='--python /path/to/python3.14' adds a Python
	$(RUN) scripts/versions.py $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format
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
	rm -rf $(VENV) .venv-peer .cache out site
