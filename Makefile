# Everything a developer needs; each target sets up .venv by itself when that is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
GPU_PYTHON ?= $(BIN)/python

.PHONY: help demo test test-long test-all test-failed test-python differential test-hosts test-engines test-page test-trackers test-gpu chaos gallery chaos-report chaos-lost chaos-strict chaos-audits soak schedules fuzz mutate matrix check format bench paths docs dist clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | sort

demo: $(READY)  ## three workers train, one is killed, one joins; under a minute
	@$(BIN)/python examples/digits/demo.py

# Where it is set, each process of the tests would compile all sources anew that it imports, and pytest rewrite its files.
unexport PYTHONDONTWRITEBYTECODE

LANES ?= 3
# Tests start jobs of `python`, which is not there without an environment on all machines.
PYTEST = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n $(LANES) --dist loadfile --no-loadscope-reorder --ignore tests/engines --ignore tests/browser --ignore tests/trackers

test: $(READY)  ## the tests, without long ones and those of the engines, of the browser and of trackers; LANES=3 files at a time
	@echo "Running the tests, with real processes and real kills; this takes some fifteen minutes on two slow cores ..."
	@$(PYTEST) -m "not long and not chaos_long and not gpu"

test-long: $(READY)  ## the long tests, which 'make test' leaves out: many jobs each, with faults at many places
	@echo "Running the long tests; this takes some fifteen minutes ..."
	@$(PYTEST) -m "long and not gpu"

test-all: test test-long  ## both

test-failed: $(READY)  ## what failed in the last run, one test after the other
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

test-python:  ## the unit tests with another Python, in .venv-python; PYTHON=python3.13
	@test -x .venv-python/bin/python || { echo "Installing the pinned packages into .venv-python; torch is large ..."; \
		$(PYTHON) -m venv .venv-python && \
		.venv-python/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt && \
		.venv-python/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . \
		|| { rm -rf .venv-python; exit 1; }; }
	@.venv-python/bin/python -m pytest -n $(LANES) --dist loadfile tests/unit tests/property

differential: $(READY)  ## the same scripts under torch and in place, with a kill and a join: their values are compared; ONLY=steps-
	@$(BIN)/python -m tests.differential.run $(if $(ONLY),--only $(ONLY))

test-hosts: $(READY)  ## of the engines' tests those that this machine has the programs for: sshd, Slurm, mpirun; ENGINE=ssh: only these; installs nothing
	@echo "Running the tests of hosts that are started by $(if $(ENGINE),$(ENGINE),ssh or Slurm or mpirun), as far as these are installed ..."
	@$(BIN)/python -m pytest tests/engines $(if $(ENGINE),-k $(ENGINE))

test-engines: $(READY)  ## the engines' tests; installs what they need: packages of Debian, as root, and of PyPI, in .venv-engines
	@missing=$$(for each in sshd:openssh-server srun:slurm-wlm munged:munge mpirun:openmpi-bin java:default-jre-headless etcd:etcd-server; do \
		command -v $${each%%:*} >/dev/null || [ -x /usr/sbin/$${each%%:*} ] || echo $${each##*:}; done); \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing $$(echo $$missing) ..."; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -yqq --no-install-recommends $$missing >/dev/null; \
	elif [ -n "$$missing" ]; then echo "Not installed, so that tests are skipped: $$(echo $$missing)"; fi
	@test -x .venv-engines/bin/python || $(BIN)/python -m venv .venv-engines
	@echo $(CURDIR)/.venv/lib/python*/site-packages > "$$(echo .venv-engines/lib/python*/site-packages)/farandole-dev.pth"
	@echo "Installing the packages of the engines into .venv-engines ..."
	@.venv-engines/bin/python -m pip install --quiet --disable-pip-version-check -r tests/engines/requirements.txt
	@PATH="$(CURDIR)/.venv-engines/bin:$$PATH" PYTHONPATH="$(CURDIR)/src" .venv-engines/bin/python -m pytest tests/engines tests/unit/engines

test-page: $(READY)  ## the page in Chromium and in Prometheus, and the notebook in Jupyter; installs programs from Debian, as root, and packages of PyPI, in .venv-browser
	@missing=$$(for each in chromium prometheus; do command -v $$each >/dev/null || echo $$each; done); \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing $$(echo $$missing) ..."; apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -yqq --no-install-recommends $$missing fonts-dejavu-core >/dev/null; \
	elif [ -n "$$missing" ]; then echo "Not installed, so that tests are skipped: $$(echo $$missing)"; fi
	@test -x .venv-browser/bin/python || $(BIN)/python -m venv .venv-browser
	@echo $(CURDIR)/.venv/lib/python*/site-packages > "$$(echo .venv-browser/lib/python*/site-packages)/farandole-dev.pth"
	@.venv-browser/bin/python -m pip install --quiet --disable-pip-version-check -r tests/browser/requirements.txt
	@PATH="$(CURDIR)/.venv-browser/bin:$$PATH" PYTHONPATH="$(CURDIR)/src" PAGE_PICTURES="$(PICTURES)" .venv-browser/bin/python -m pytest -s tests/browser tests/unit/page tests/integration/test_notebook.py

test-trackers: $(READY)  ## the recipes for TensorBoard, MLflow and Weights & Biases, and the loggers of Lightning and transformers; installs them in .venv-trackers
	@test -x .venv-trackers/bin/python || $(BIN)/python -m venv .venv-trackers
	@echo $(CURDIR)/.venv/lib/python*/site-packages > "$$(echo .venv-trackers/lib/python*/site-packages)/farandole-dev.pth"
	@echo "Installing the trackers into .venv-trackers ..."
	@.venv-trackers/bin/python -m pip install --quiet --disable-pip-version-check -r tests/trackers/requirements.txt
	@PATH="$(CURDIR)/.venv-trackers/bin:$$PATH" PYTHONPATH="$(CURDIR)/src" .venv-trackers/bin/python -m pytest tests/trackers

test-gpu: $(READY)  ## the tests that need a CUDA device; GPU_PYTHON=python of an environment with CUDA
	@PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu tests/gpu tests/integration/test_transports.py

chaos: $(READY)  ## jobs under random faults; SEED=1 MINUTES=5, HOSTS=3 (root), SPARES=1; see docs/chaos.md
	@$(BIN)/python -m tests.chaos.run --seed $${SEED:-1} --minutes $${MINUTES:-5} --hosts $${HOSTS:-0} --spares $${SPARES:-0}

gallery: $(READY)  ## loop bodies as people write them, with faults at their lines; SEED=1 JOBS=200 LANES=2, EVERY=20, STRICT=1; see docs/chaos.md
	@$(BIN)/python -m tests.gallery.run --seed $${SEED:-1} --jobs $${JOBS:-200} --lanes $${LANES:-2} $(if $(EVERY),--every $(EVERY)) $(if $(STRICT),--strict)

chaos-report: $(READY)  ## what all chaos runs and soak runs have come to
	@$(BIN)/python -m tests.chaos.report

chaos-lost: $(READY)  ## jobs of which everything is killed twenty times, with checkpoints, CHAOS_SEED=4000; or the coordinator, at any time
	@$(BIN)/python -m pytest -m chaos_long tests/chaos

chaos-strict: $(READY)  ## strict mode: every model over every transport, and jobs under faults and restarts, SEED=1 JOBS=50: each leaves the bits of a process alone
	@$(BIN)/python -m pytest -m chaos_long tests/integration/test_strict_mode.py tests/integration/test_shard_audits.py
	@$(BIN)/python -m tests.chaos.strict --seed $${SEED:-1} --jobs $${JOBS:-50}

chaos-audits: $(READY)  ## flipped bits in audited shards, SEED=1 JOBS=50: each is found; and QUIET=100000 shards without a false alarm
	@$(BIN)/python -m tests.chaos.audits --seed $${SEED:-1} --jobs $${JOBS:-50} --quiet $${QUIET:-100000}

schedules: $(READY)  ## data order, membership and balance under random schedules; DATA_SCHEDULES=100000 MEMBERSHIP_SCHEDULES=8000 LARGE_WORKERS=1024 BALANCE_SCHEDULES=2000
	@DATA_SCHEDULES=$${DATA_SCHEDULES:-100000} MEMBERSHIP_SCHEDULES=$${MEMBERSHIP_SCHEDULES:-8000} LARGE_WORKERS=$${LARGE_WORKERS:-1024} \
		BALANCE_SCHEDULES=$${BALANCE_SCHEDULES:-2000} $(BIN)/python -m pytest --timeout 3600 tests/property/test_data_order.py \
		tests/property/test_membership_schedules.py tests/property/test_balance_schedules.py

fuzz: $(READY)  ## inputs that nobody sends on purpose, for each decoder and each port; SEED=1 INPUTS=1000000
	@$(BIN)/python -m tests.fuzz.run --seed $${SEED:-1} --inputs $${INPUTS:-1000000}

mutate: $(READY)  ## one-line faults in the core, and which of them the unit and property tests notice; SEED=1 MUTANTS=60 FILES="training/worker/*.py"; see tests/README.md
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutation.run --seed $${SEED:-1} --mutants $${MUTANTS:-60} $(if $(FILES),--files $(FILES))

matrix: $(READY)  ## the core tests with the oldest and the newest torch, 6 GB for each; TORCH="2.9.1"; see tests/README.md
	@$(BIN)/python -m tests.matrix.run $(TORCH)

check: $(READY)  ## lint, format, types, import direction, terms, mentioned files, sizes
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/unit/test_layers.py tests/unit/test_glossary.py tests/unit/test_docstrings.py \
		tests/unit/test_mentions.py tests/unit/test_size.py tests/unit/test_private_names.py

format: $(READY)  ## let ruff put everything into shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

soak: $(READY)  ## a worker is killed every EVERY=15 seconds for MINUTES=5; FLAGS="--flag=--spares=1"
	@$(BIN)/python -m benchmarks.soak --minutes $${MINUTES:-5} --every $${EVERY:-15} $(FLAGS)

bench: $(READY)  ## recovery and step times, memory, all-reduce; three quarters of an hour; ONLY="recovery restart": these parts
	@$(BIN)/python -m benchmarks.run $(if $(ONLY),--only $(ONLY))

paths: $(READY)  ## how many files run from a kill to the next step, in a step, in an all-reduce; FLAGS=--list
	@$(BIN)/python -m benchmarks.files_on_path $(FLAGS)

docs: $(READY)  ## the documentation as web pages, into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Written to site/index.html; with its search: $(BIN)/python -m http.server -d site"

dist: $(READY)  ## wheel and sdist, checked as for a release: twine, an installation of its own, the demo from it
	@$(BIN)/python -m tests.release.run

clean:  ## remove what the other targets made
	@rm -rf .venv .venv-browser .venv-engines .venv-trackers .venv-dist .venv-torch .venv-python site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .mutation
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted set-up is taken up again the next time. A .venv without pip is one whose
# creation was interrupted.
$(READY): requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Farandole needs Python 3.11 or newer; %s is %d.%d. Say which: make PYTHON=/path/to/python3 ..." % (sys.executable, v[0], v[1]))'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo "Creating .venv with $$($(PYTHON) --version) ..."; $(PYTHON) -m venv --clear .venv; }
	@echo "Installing the pinned packages into .venv; torch is large, this may take some minutes ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)
	@echo "Ready."
