# Every target prepares what it needs first: on a fresh Debian or Ubuntu machine with Python 3.10+,
# `make demo` or `make test` is the only command to type. Prepared once, the preparation is quick.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
SAN ?= plain
PYTEST_ARGS ?=
# Processes that run tests beside each other. Tests that start two ranks keep two cores busy already.
PYTEST_JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(PYTEST_JOBS) --dist loadgroup --no-loadscope-reorder --durations=10
# Of the tests that `make test` leaves out: 2/3 is the second of three shares.
SHARE ?= 1/1
BENCH_ARGS ?=
KILL_ARGS ?=
SOAK_ARGS ?=
FUZZ_ARGS ?=
VERSIONS_ARGS ?=
# The oldest that is supported, and one that has half of the differences to the newest.
RELEASES ?= 0.18.4 0.19.2
FRAMEWORKS_ARGS ?=
# Of random delays on the emulated device; 0 has none.
DEVICE_SEEDS ?= 0,1,2,3,4,5,6,7,8,9,10

DEMO_OUT ?= demo-out
DEMO_CONFIG ?= configs/nvme_cpu.json
DEMO_ARGS ?=
SHOWCASE_ARGS ?=

# Tools of the site alone, which neither tests nor training have beside them.
DOCS := .venv/docs
DOCS_REQUIREMENTS := scripts/requirements-docs.txt

# DeepSpeed's compiled operators belong to this environment: its usual cache is shared by all, keyed
# by name alone.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.venv/torch_extensions
# The first folder has its operators compiled in half the time.
export PATH := $(CURDIR)/scripts/quick_compiler:$(CURDIR)/$(BIN):$(PATH)
# Hundreds of processes import the package and what tests them: each would compile it anew.
unexport PYTHONDONTWRITEBYTECODE
ifeq ($(shell nvidia-smi -L 2>/dev/null),)
export DS_ACCELERATOR ?= cpu
# The Triton kernel is tested in Triton's interpreter where there is no device.
export TRITON_INTERPRET ?= 1
endif

.PHONY: help all compiler environment demo showcase test test-all test-root lint type test-cpp docs bench bench-memory
.PHONY: bench-step bench-overlap bench-forms bench-formats bench-context bench-volumes kill-test soak fuzz clean
.PHONY: device test-device
.PHONY: test-releases test-versions test-frameworks

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

all: lint type test-cpp test ## lint, type, test-cpp and test

# What is compiled without .venv need not wait for it.
compiler:
	@scripts/setup_environment.sh compiler

environment: ## system packages, .venv, DeepSpeed's operators
	@scripts/setup_environment.sh

demo: environment ## the same fine-tune with stock DeepSpeed and with memascend, side by side
	$(BIN)/memascend compare --out $(DEMO_OUT) -- deepspeed --num_gpus 1 scripts/finetune.py \
	    --deepspeed_config $(DEMO_CONFIG) $(DEMO_ARGS)

showcase: environment ## two steps of 3.2 billion parameters on the CPU, in a few GiB of RAM and 48 GiB of drive
	$(BIN)/python scripts/showcase.py $(SHOWCASE_ARGS)

device: environment # the emulated device that tests/device trains on
	@$(BIN)/python -m tests.device.emulator.build

test: environment device ## the Python tests of every feature, in about eleven minutes
	$(PYTEST) -m "not full and not matrix" $(PYTEST_ARGS)

test-all: environment device ## all Python tests but those that repeat others; SHARE=2/3 is a share of the slow ones
	$(PYTEST) -m "not matrix and not coarse" --hypothesis-profile=full --share $(SHARE) $(PYTEST_ARGS)

test-device: environment device ## everything on the emulated device, with every seed, for hours
	$(PYTEST) --device-seeds $(DEVICE_SEEDS) tests/device $(PYTEST_ARGS)
	$(PYTEST) -m matrix --ignore tests/device $(PYTEST_ARGS)

test-root: environment ## the tests that need root: loop devices, mounts, control groups
	$(BIN)/python -m pytest -m root --some-must-run $(PYTEST_ARGS)

test-releases: environment ## the quick tests of parity with the oldest DeepSpeed and one in the middle
	$(BIN)/python scripts/try_releases.py $(RELEASES)

test-versions: environment ## releases of DeepSpeed, torch and transformers, each in an environment of its own
	$(BIN)/python scripts/try_versions.py $(VERSIONS_ARGS)

test-frameworks: environment ## each training framework as pip installs it, its recipe compared with CPU offload
	$(BIN)/python scripts/try_frameworks.py $(FRAMEWORKS_ARGS)

test-cpp: compiler ## the C++ tests; SAN=address or SAN=thread with a sanitizer
	$${PYTHON:-python3} scripts/test_cpp.py --san $(SAN)

lint: environment ## style of Python, C++ and shell, and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.cpp' '*.hpp' | xargs --no-run-if-empty $(BIN)/clang-format --dry-run -Werror
	$(BIN)/shellcheck scripts/*.sh scripts/*/*.sh deploy/*.sh scripts/quick_compiler/* .ci/run
	git ls-files | xargs --no-run-if-empty $(BIN)/codespell
	$(BIN)/python scripts/check_commits.py

type: environment ## types of the package
	$(BIN)/mypy

docs: environment ## the documents as a site in build/site, for reading offline; broken links fail
	@test "$$(cat $(DOCS)/made-with 2> /dev/null)" = "$$(cat $(DOCS_REQUIREMENTS))" || { \
	    $(BIN)/python -m venv --clear $(DOCS); \
	    $(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r $(DOCS_REQUIREMENTS); \
	    cp $(DOCS_REQUIREMENTS) $(DOCS)/made-with; }
	@# Not with --quiet: what it does not print it does not count among the warnings that fail.
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --clean

bench: environment ## engine, overflow check and allocator against DeepSpeed's
	$(BIN)/python benchmarks/run.py

bench-memory: environment ## peak memory of training as the model grows, against stock
	$(BIN)/python benchmarks/bench_memory.py $(BENCH_ARGS)

bench-step: environment ## time and drive traffic of training steps, against stock
	$(BIN)/python benchmarks/bench_step.py $(BENCH_ARGS)

bench-forms: environment ## bytes and seconds of each form of a step beside a slow drive
	$(BIN)/python benchmarks/bench_forms.py $(BENCH_ARGS)

bench-formats: environment ## losses, updates and second moments with moments in 8 bits and master weights in 24
	$(BIN)/python benchmarks/bench_formats.py $(BENCH_ARGS)

bench-overlap: environment ## what of a step overlaps: compute of a stated time beside the drive
	$(BIN)/python benchmarks/bench_overlap.py $(BENCH_ARGS)

bench-context: environment ## peak memory and time of steps of more and more tokens
	$(BIN)/python benchmarks/bench_context.py $(BENCH_ARGS)

bench-volumes: environment ## two drives of unlike speed, striped (root: loop devices)
	$(BIN)/python benchmarks/bench_volumes.py $(BENCH_ARGS)

kill-test: environment ## runs killed at random moments, and resumed
	$(BIN)/python tests/integration/kill_runs.py $(KILL_ARGS)

soak: environment ## random operations and faults against a model, under ASan and TSan
	$(BIN)/python scripts/soak.py $(SOAK_ARGS)

fuzz: environment ## headers, manifests and configs that somebody else may have written
	$(BIN)/python -c 'import atheris' 2> /dev/null || $(BIN)/python -m pip install --quiet 'atheris>=3.0'
	$(BIN)/python scripts/fuzz.py $(FUZZ_ARGS)

clean: ## what was built, and what the demo left on the drive; not the environment
	rm -rf build dist memascend/_core*.so demo-out showcase-out nvme_swap
