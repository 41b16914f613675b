# Every target installs what it needs into .venv first; a fresh machine needs only make and python3.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint requirements/constraints.txt

# One thread per process: on tiny tensors a second OpenMP thread costs ten times what it brings.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TRL_EXPERIMENTAL_SILENCE := 1

.PHONY: demo test check mutations probes bench clean

demo: $(VENV)/.installed  ## train the embedded model on guess-the-number, in minutes
	$(VENV)/bin/agile-trainers demo

test: $(VENV)/.installed-dev  ## the test suite, under ten minutes on two cores
	$(RUN) -m pytest -n 2 -m "not slow and not gpu"

check: $(VENV)/.installed-dev  ## style and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

mutations: $(VENV)/.installed-dev  ## break the code on purpose; a test must notice each time
	$(RUN) tests/mutations.py

probes: $(VENV)/.installed  ## the probe environments, each to its threshold on three seeds; resumable
	$(RUN) benchmarks/probes.py

bench: $(VENV)/.installed  ## overlap of slow environments; rollout and update time, beside TRL's GRPOTrainer
	$(RUN) benchmarks/slow_environments.py
	$(RUN) benchmarks/rollout_vs_trl.py

clean:  ## forget the environment and the caches, not the runs
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml requirements/constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml requirements/constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable ".[dev]"
	touch $@ $(VENV)/.installed
