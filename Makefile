# setup            the pinned CPU environments: .venv, and .venv-sglang beside it (SGLang pins other versions of what vLLM needs)
# check            lint, types, docs and unit tests: 3 minutes    test     check, then the tests with the real peers: 20 to 43 minutes
# nightly          everything else, for hours; ONLY='tests/peers/trl' runs one part of it
# mutants          plants faults in the product and runs the tests that must notice; FAULTS='kl verl' plants those alone
# stack            builds what users of STACK=trl-oldest, trl-newest, verl-pins or verl-sglang have, and runs its tests
# demo             the main job, settings side by side; FULL=1 trains too    bench    ratios as JSON lines
# real             the main job on a real model, SmolLM2-135M-Instruct, and on a mixture of experts made from it; FULL=1 trains too
# dist             sdist and wheel in dist/, the wheel installed and run in an empty environment
# docs             the site in runs/site, with search and the API reference; a dead link is an error    words    of the pages
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
export PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2
STACKS := trl-oldest trl-newest verl-pins verl-sglang
# A file's tests share engines and runs, so that they stay in one process; the folders with the longest files come first.
PEERS := $(addprefix tests/peers/,verl engines trl conformance transformers) $(wildcard tests/peers/test_*.py)
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 10

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1
export NO_MKDOCS_2_WARNING = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: setup check docs words test nightly mutants stack demo real bench dist lock clean

setup: .venv/.installed .venv-sglang/.installed

.venv/.installed: requirements/*cpu.txt requirements/install.sh pyproject.toml
	@bash requirements/install.sh cpu .venv

.venv-sglang/.installed: requirements/*sglang-cpu.txt requirements/torchtitan-cpu.txt requirements/install.sh pyproject.toml
	@bash requirements/install.sh sglang .venv-sglang

docs: .venv/.installed
	$(BIN)/mkdocs build --quiet

words:
	@wc -w README.md CONTRIBUTING.md && wc -w docs/*.md docs/*/*.md

# mypy has one thread, and a minute to do in a fresh clone: beside the tests, the two fill two cores.
check: docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -q -n $(JOBS) -m "not nightly" tests/unit tests/patching || { kill $$types; exit 1; }; wait $$types

test: setup check
	$(PYTEST) -m "not nightly" $(PEERS)

# With engines that compile, which tests/conftest.py leaves out of each landing.
nightly: setup
	TORCH_COMPILE_DISABLE=0 $(PYTEST) -m nightly $(or $(ONLY),tests)
	$(if $(ONLY),,$(MAKE) mutants && for name in $(STACKS); do $(MAKE) stack STACK=$$name; done)

mutants: setup
	$(BIN)/python -m tests.mutants $(FAULTS) --jobs $(JOBS)

stack: # builds an environment of its own, from the package index
	$(PYTHON) -m tests.stacks $(or $(STACK),$(error STACK=name is missing, one of $(STACKS))) --jobs $(JOBS)

demo: .venv/.installed
	$(BIN)/python -m examples.demo --model $(or $(MODEL),both) --run-dir $(or $(RUN_DIR),runs/demo) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(PROMPTS),--prompts $(PROMPTS)) $(if $(FULL),--full)

real: .venv/.installed
	$(BIN)/python -m pip install -q -c requirements/constraints-cpu.txt -r requirements/real.txt
	$(BIN)/python -m examples.demo --model real --run-dir $(or $(RUN_DIR),runs/real) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(PROMPTS),--prompts $(PROMPTS)) $(if $(FULL),--full)

bench: .venv/.installed
	@$(BIN)/python -m benchmarks

dist: .venv/.installed
	@bash requirements/dist.sh

# Rewrites the constraints from the present .venv, for a maintainer who has changed requirements/cpu.txt.
lock: .venv/.installed
	$(BIN)/pip freeze --exclude-editable --exclude mismatch-ext | sed -E 's/\+cpu$$//' > requirements/constraints-cpu.txt

clean:
	rm -rf .venv .venv-sglang .stacks runs build dist *.egg-info
