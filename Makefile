# Development commands; they need Python, pip and make.
# The environment is in .venv; except for temporary files, nothing is written outside this folder.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
PIP := $(BIN)/python -m pip install -qq --no-cache-dir --disable-pip-version-check \
	--constraint $(CONSTRAINTS)

# Test files are distributed over this many processes, each of which imports all of them first.
# Twice the cores of a small machine, because tests spend half of the time waiting.
TEST_PROCESSES ?= 4
# The tests start hundreds of processes, which would otherwise each compile the package again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# The version of axe-core that checks the pages.
AXE := 4.14.0

# Both ends of the supported torch range; also in paceline.torch_private.
TORCH_oldest := 2.11
TORCH_newest := 2.15

.PHONY: help demo test tests lint types unit messages modules matrix oldest newest across \
	libraries integrations docs package bench screens clean

help:  ## show this list (the default)
	@echo "make TARGET, with PYTHON=/path/to/python to choose another Python than python3:"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 15

demo: $(VENV)/.installed  ## set up the environment, then train a small model on two CPU workers
	@$(BIN)/paceline demo

test:  ## set up the environment, then lint, check types and run every test
	@$(MAKE) --no-print-directory -j3 lint types tests

tests: $(VENV)/.installed-dev
	$(PYTEST)

lint: $(VENV)/.installed-dev  ## ruff, the import diagram of ARCHITECTURE.md, package interfaces
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_interfaces.py

types: $(VENV)/.installed-dev  ## mypy --strict
	$(BIN)/mypy

unit: $(VENV)/.installed-dev  ## the tests without a second rank: about a minute
	$(PYTEST) tests/unit

messages: $(VENV)/.installed-dev  ## write all error messages to tests/data/messages.txt
	$(BIN)/python scripts/site_parts.py > tests/data/messages.txt

matrix: $(VENV)/.installed-dev  ## test every option with every fault; can be interrupted and resumed
	$(BIN)/python -m tests.matrix

modules: $(VENV)/.installed-dev  ## write the list of modules to docs/modules.md
	$(BIN)/python scripts/site_parts.py modules > docs/modules.md

oldest:  ## the engines' and the launcher's tests with torch 2.11, in .venv-oldest
newest:  ## the same with torch 2.15, in .venv-newest: up to 6 GB
oldest newest: %: build/constraints-%.txt
	@$(MAKE) --no-print-directory VENV=.venv-$@ CONSTRAINTS=$< across

across: $(VENV)/.installed-dev
	$(PYTEST) tests/unit/test_torch_private.py tests/ranks tests/processes tests/e2e

build/constraints-%.txt: constraints.txt Makefile
	@mkdir -p build
	@sed 's/^torch==.*/torch==$(TORCH_$*).*/' $< > $@

libraries: $(VENV)/.installed-dev  ## install the libraries that the integration tests use: 2 GB
	$(PIP) --no-build-isolation --editable '.[datasets,docs,mlflow,parquet,tensorboard,torchdata,trackio,wandb,webdataset]'
	$(PIP) --no-build-isolation --editable '.[accelerate,lightning,ray,transformers]'
	$(PIP) kubeflow-trainer-api

integrations: libraries  ## run the tests against other libraries
	$(BIN)/pytest -q tests/integrations

docs: $(VENV)/.installed-dev  ## build the documentation into build/site; a warning is an error
	$(PIP) --no-build-isolation --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package: $(VENV)/.installed-dev  ## build the wheel and the sdist into dist/
	$(BIN)/python -m hatchling build --clean
	@ls -l dist

bench: $(VENV)/.installed-dev  ## run all benchmarks that need no GPU: 25 minutes on an idle machine
	$(PIP) --no-build-isolation --editable '.[bench]'
	$(BIN)/python -m benchmarks all --out build/benchmarks

# axe-core checks the pages for accessibility; without it they are not checked.
screens: docs  ## screenshots of pages, lessons and site in build/screenshots, checked by axe-core
	@mkdir -p build
	@npm install --silent --no-audit --no-fund --prefix build/axe axe-core@$(AXE) >build/axe.log 2>&1 \
		|| echo "axe-core could not be installed, so pages are not checked; see build/axe.log"
	$(BIN)/python scripts/screenshots.py --out build/screenshots --site build/site \
		--axe build/axe/node_modules/axe-core/axe.min.js

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .venv-oldest .venv-newest build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Some systems have pip but not the module that installs pip into new environments.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("Paceline needs Python 3.11 \
	or newer, and $(PYTHON) is " + sys.version.split()[0] + ". Choose another: make PYTHON=...")'
	@echo "Creating $(VENV) with $(PYTHON) ..."
	@$(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install -qq --no-cache-dir pip; }
	@touch $@

# The build tools are installed first and pinned, so that a build downloads nothing.
$(VENV)/.installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	@echo "Installing Paceline and torch into $(VENV) ..."
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[watch]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the development tools ..."
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
