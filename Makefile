# Everything a stranger needs, from a machine that has Python, pip and make.
# The environment lives in .venv; apart from temporary files, nothing is written outside this folder.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --no-cache-dir --disable-pip-version-check \
	--constraint constraints.txt

# Test files are shared out to this many processes, each of which reads all of them first. One more
# than there are cores in a small machine, because many tests wait.
TEST_PROCESSES ?= 3
# The tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: help demo test tests lint types unit libraries integrations docs package bench clean

help:  ## show this list (the default)
	@echo "make TARGET, with PYTHON=/path/to/python to choose another one than python3:"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 10

demo: $(VENV)/.installed  ## set up, then train a small model on two CPU workers
	@$(BIN)/paceline demo

test: lint  ## set up, then lint, check types and run every test
	@$(MAKE) --no-print-directory -j2 types tests

tests: $(VENV)/.installed-dev
	$(PYTEST)

lint: $(VENV)/.installed-dev  ## ruff, and the import diagram of ARCHITECTURE.md
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.installed-dev  ## mypy --strict
	$(BIN)/mypy

unit: $(VENV)/.installed-dev  ## the tests that need no second rank: about a minute
	$(PYTEST) tests/unit

libraries: $(VENV)/.installed-dev  ## install the other libraries that tests use: 2 GB
	$(PIP) --no-build-isolation --editable '.[datasets,docs,mlflow,parquet,tensorboard,torchdata,trackio,wandb,webdataset]'
	$(PIP) --no-build-isolation --editable '.[accelerate,lightning,ray,transformers]'
	$(PIP) kubeflow-trainer-api

integrations: libraries  ## the tests against other libraries
	$(BIN)/pytest -q tests/integrations

docs: $(VENV)/.installed-dev  ## build the documentation into build/site; a warning is an error
	$(PIP) --no-build-isolation --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package: $(VENV)/.installed-dev  ## build the wheel and the sdist into dist/
	$(BIN)/python -m hatchling build --clean
	@ls -l dist

bench: $(VENV)/.installed-dev  ## measure everything that needs no GPU: 25 minutes, keep quiet
	$(PIP) --no-build-isolation --editable '.[bench]'
	$(BIN)/python -m benchmarks all --out build/benchmarks

clean:  ## remove the environment and all caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Some systems have pip but not the module that puts pip into new environments.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("Paceline needs Python 3.11 \
	or newer, and $(PYTHON) is " + sys.version.split()[0] + ". Choose another: make PYTHON=...")'
	@echo "Creating $(VENV) with $(PYTHON) ..."
	@$(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install -qq --no-cache-dir pip; }
	@touch $@

# The build tools are installed first and pinned, so that building fetches nothing by itself.
$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing Paceline and torch into $(VENV) ..."
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[watch]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the development tools ..."
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
