# Two commands: `make train` shows the main job, `make test` proves it. Both set everything up.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
DOCS := NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(RUN) -m mkdocs build --strict
NEST := .venv-nest/bin/python
ARENA := .venv-arena/bin/python
BROWSER := .venv-browser/bin/python
TORCH ?= torch==2.13.0

.PHONY: train test messages rotate zoo conformance reference fuzz properties torture operations models published versions scale browser lint types mutants budgets bench bench-sparse bench-compile learn nest arena rules docs notebooks clean

train: $(READY)
	$(VENV)/bin/braintrace train evidence

test: $(READY)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	MESSAGES=check JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist worksteal  # builds the docs too

messages: $(READY)  # writes tests/texts/messages.txt from the daily tests; review its diff
	MESSAGES=write JAX_PLATFORMS=cpu $(RUN) -m pytest tests -n 2 --dist worksteal
	git diff --stat -- tests/texts/messages.txt

SEED ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo 0)
SEED_NUMBER = $(shell $(RUN) -c 'import zlib; print(zlib.crc32(b"$(SEED)") % 1000000)')

rotate: $(READY)  # cases drawn by the commit's hash for MINUTES=14; SEED=... draws the same again
	ZOO=all ROTATE=$(SEED) OPTIMISED=all SEEDS=$(SEED_NUMBER):$$(($(SEED_NUMBER) + 3)) JAX_PLATFORMS=cpu \
	    $(RUN) -m pytest tests -n 2 --dist load --maxschedchunk 1

zoo: $(READY)  # every case of every test, of which the daily run takes a part
	ZOO=all JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist worksteal --ignore tests/gradients/test_conformance.py

conformance: $(READY)  # every rule on every model, for hours; RULE=rtrl: by one rule
	ZOO=all RULE=$(RULE) JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist worksteal tests/gradients/test_conformance.py

reference: $(READY)  # gradients of all models by all rules, recorded; ARGS='--check --part 3/12'
	JAX_PLATFORMS=cpu $(RUN) scripts/reference.py $(ARGS)

browser: $(READY) $(BROWSER)  # CHROME=/path/to/chrome: by that one
	JAX_PLATFORMS=cpu $(RUN) scripts/browser.py $(ARGS)

$(BROWSER):  # a Chromium from PyPI
	$(PYTHON) -m venv .venv-browser
	$(BROWSER) -m pip install --quiet PyQt6==6.11.0 PyQt6-WebEngine==6.11.0 || { rm -rf .venv-browser; exit 1; }

fuzz: $(READY)  # 10,000 random programs; any part of the seeds may be run alone
	ZOO=all SEEDS=$(or $(SEEDS),0:100) PROGRAMS=$(or $(PROGRAMS),100) JAX_PLATFORMS=cpu $(RUN) -m pytest tests/gradients/test_random_programs.py

properties: $(READY)  # what holds for every rule, on 200 random programs for each; SEEDS=7:8 draws others
	ZOO=all SEEDS=$(or $(SEEDS),0:10) PROGRAMS=$(or $(PROGRAMS),20) JAX_PLATFORMS=cpu $(RUN) -m pytest tests/gradients/test_properties.py

torture: $(READY)  # faults on purpose; ARGS='--part kills --seed 3 --minutes 10 --resume'
	JAX_PLATFORMS=cpu $(RUN) -m torture $(ARGS)

operations: $(READY)
	$(RUN) scripts/operations.py
	OPERATIONS=all JAX_PLATFORMS=cpu $(RUN) -m pytest tests/unit/operations/test_operations.py

models: $(READY)
	JAX_PLATFORMS=cpu $(RUN) scripts/any_model.py

published: $(READY)  # scripts in the published package's idioms, on it and on ours
	$(RUN) published/run.py $(ARGS)

versions: $(READY)  # the lowest and the newest versions; ARGS='--python /path/to/python3.14' adds a Python
	$(RUN) scripts/versions.py $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format
	$(RUN) -m mypy

types: $(READY)  # the examples as a user's own code, by two type checkers
	$(RUN) -m mypy
	$(RUN) -m pyright --pythonpath $(RUN)

budgets: $(READY)  # what calls cost, without clocks: measured again, written, the difference printed
	$(RUN) scripts/budgets.py

mutants: $(READY)  # single faults put into the engine; first ARGS=--record, then ARGS='--part 1/10 --resume'
	$(RUN) scripts/mutants.py $(ARGS)

scale: $(READY)  # several devices and processes of this machine beside one
	$(RUN) benchmarks/scale.py $(ARGS)

bench: $(READY)
	$(RUN) benchmarks/run.py $(ARGS)
	$(if $(ARGS),,$(RUN) benchmarks/sparse.py)

bench-sparse: $(READY)  # the sparse networks of `make bench` alone; ARGS='--only 20000'
	$(RUN) benchmarks/sparse.py $(ARGS)

learn: $(READY)
	$(RUN) experiments/learning.py $(ARGS)

rules: $(READY)  # ARGS=--table: the table of rules and their pages only, in seconds
	JAX_PLATFORMS=cpu $(RUN) experiments/rules.py $(ARGS)
	JAX_PLATFORMS=cpu $(RUN) scripts/rule_pages.py

nest: $(READY) $(NEST)  # the two e-prop tasks by NEST, in a venv of its own, and by this library
	JAX_PLATFORMS=cpu $(RUN) scripts/eprop_in_nest.py --nest $(NEST)

$(NEST):
	$(PYTHON) -m venv .venv-nest
	$(NEST) -m pip install --quiet nest-simulator || { rm -rf .venv-nest; exit 1; }

arena: $(READY) $(ARENA)  # other libraries of spiking networks beside this one; ARGS='--cores 1 --size 512'
	$(RUN) benchmarks/arena/run.py $(ARGS)

# PyTorch first and pinned, so that the others do not bring another build of it. Where
# pip has a CUDA build only, name the index of PyTorch's CPU builds:
#     make arena TORCH='torch==2.13.0 --index-url URL'
$(ARENA):
	$(PYTHON) -m venv .venv-arena
	{ $(ARENA) -m pip install --quiet --upgrade pip && $(ARENA) -m pip install --quiet $(TORCH) && $(ARENA) -m pip install --quiet torch==2.13.0 snntorch==1.0.0 spikingjelly==2.0.0 norse==1.1.0 nest-simulator==3.10.0; } || { rm -rf .venv-arena; exit 1; }

docs: $(READY)
	$(DOCS)

notebooks: $(READY)  # the notebooks of the tutorials, from their pages
	$(RUN) scripts/notebooks.py

bench-compile: $(READY)
	JAX_PLATFORMS=cpu $(RUN) benchmarks/compile_time.py

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-arena .venv-browser .venv-peer .venv-nest .venv-published .cache out site
