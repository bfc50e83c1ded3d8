# The developer's commands. Every target first makes .venv (quick when nothing changed); none
# needs root or a GPU. `make help` lists them.

VENV := .venv
BIN  := $(VENV)/bin

# Which torch is installed: decided here and nowhere else (a cluster host: the trainer role).
#   auto  the CUDA build where nvidia-smi answers, else the CPU build
#   cpu   the CPU build: the wheel that pip's own configuration offers, else TORCH_CPU_INDEX
#   cuda  PyPI's build
TORCH           ?= auto
TORCH_VERSION   := 2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# The soak: how long, which faults, how many (12 a minute by default), and of which exchange.
MINUTES ?= 10
SEED    ?= 0
FAULTS  ?=
EXCHANGE ?=

# The demo's Vulkan device: `software` takes Mesa's llvmpipe (no GPU needed, and slow).
VULKAN ?=

# `make setup SYSTEM=1 PYTHON=... WHEELS=DIR` installs into the environment of that Python, without a
# network: scripts/install_into.sh.

export VENV VULKAN TORCH TORCH_VERSION TORCH_CPU_INDEX
# Hundreds of short processes: each would compile our sources, and pytest the tests, once more.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup lock demo demo-distill demo-real test test-fast test-all test-real testbed soak lint docs bench clean

help:
	@echo "make setup      make or update .venv: Python packages only, no root"
	@echo "make lock       after a change of pyproject.toml: write launcher/locks (UPGRADE=1: newest versions)"
	@echo "make demo       three workers fine-tune one model on this machine, from nothing to a report"
	@echo "make demo-distill  a teacher, its student and an eval runner at once, to a table of losses"
	@echo "make demo-real  a published model learns to sort Debian's packages; answers before and after"
	@echo "make test       quick lint, the fast tests, the wgpu engine, forty with real processes"
	@echo "make test-fast  quick lint and the fast tests"
	@echo "make test-all   all that needs no further software: minutes (docs/testing.md)"
	@echo "make test-real  a published model of 135 million weights, from packages (docs/testing.md)"
	@echo "make testbed    the tests with booted Debian hosts: root, and minutes (tests/testbed/README.md)"
	@echo "make soak       one run among faults: MINUTES=60 SEED=7 FAULTS=1000 (tests/soak/README.md)"
	@echo "make lint       format, lint, types, import rules, recipes, documents"
	@echo "make docs       the documentation as a site: build/site/index.html"
	@echo "make bench      every benchmark, one after the other; JSON in benchmarks/results/"
	@echo "make clean      remove caches, build products and the demo's output (not .venv)"

setup:
	@bash scripts/$(if $(SYSTEM),install_into,setup).sh

# The environment that is there serves: it may not fit the new locks until the next `make setup`.
lock:
	@$(BIN)/python scripts/lock.py $(if $(UPGRADE),--upgrade)

demo: setup
	@bash scripts/demo.sh

demo-distill: setup
	@bash scripts/demo_distill.sh

demo-real: setup
	@bash scripts/demo_real.sh

test: setup
	@bash scripts/test.sh lint fast+smoke vulkan

test-all: setup
	@bash scripts/test.sh lint fast+cluster vulkan exhaustive

test-real: setup
	@bash scripts/test.sh real

testbed: setup
	@bash scripts/test.sh testbed

soak: setup
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED) $(if $(FAULTS),--faults $(FAULTS)) $(if $(EXCHANGE),--exchange $(EXCHANGE))

test-fast: setup
	@bash scripts/test.sh lint fast

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/pyright
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/ansible-lint
	$(BIN)/python scripts/role_readmes.py --check
	$(BIN)/python scripts/generated_tables.py --check
	$(BIN)/python scripts/site/build.py

docs: setup
	@$(BIN)/python scripts/site/build.py

bench: setup
	@bash scripts/bench.sh

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache demo demo-distill demo-real soak
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
