"""Every name that ChainerMN documents is there, takes what it takes, in the same order.

`Documented` has them as the API reference has (the manual of 1.3 where only that has
one). Where the reference gives a default, ours is the same; where it gives none, ours
may have one: `...`. Parameters that ours adds come after the documented ones and have
defaults.
"""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from importlib import metadata
from operator import attrgetter
from typing import Any

import chainer
import chainermn
import pytest

MODULES = "communicators datasets extensions functions iterators links optimizers"
PLACE = "rank size intra_rank inter_rank inter_size intra_size mpi_comm"


class Documented:
    """The package `chainermn`, its classes and its modules."""

    def create_communicator(
        communicator_name="hierarchical",
        mpi_comm=None,
        allreduce_grad_dtype=None,
        batched_copy=False,
    ): ...
    # `zero_fill`: DESIGN.md
    def create_multi_node_optimizer(
        actual_optimizer, communicator, double_buffering=False, zero_fill=True
    ): ...
    def create_multi_node_evaluator(actual_evaluator, communicator): ...
    def create_multi_node_checkpointer(
        name, comm, cp_interval=5, gc_interval=5, path=None
    ): ...
    def create_multi_node_checkpoint(
        name, comm, cp_interval=5, gc_interval=5, path=None
    ): ...
    def scatter_dataset(
        dataset, comm, root=0, shuffle=False, seed=None, max_buf_len=268435456
    ): ...
    def scatter_index(n_total_samples, comm): ...
    def create_empty_dataset(dataset): ...

    class CommunicatorBase:
        def allreduce(self, data): ...
        def allreduce_grad(self, model): ...
        def allreduce_obj(self, obj): ...
        def alltoall(self, xs): ...
        def bcast(self, data, max_buf_len=None, root=0): ...
        def bcast_data(self, model): ...
        def bcast_obj(self, obj, max_buf_len=None, root=0): ...
        def gather(self, data, root=0): ...
        def gather_obj(self, obj, root=0): ...
        def recv(self, source, tag): ...
        def recv_obj(self, source, tag): ...
        def send(self, data, dest, tag): ...
        def send_obj(self, obj, dest, tag): ...
        def split(self, color, key): ...

        # Not in spec/, but promised by DESIGN.md for scripts written for Chainer 7.
        def multi_node_mean_grad(self, model, zero_fill=False): ...
        def multi_node_mean(self, sendbuf, recvbuf): ...
        def set_config(self, name): ...
        def get_config(self): ...
        def finalize(self): ...

    class MultiNodeChainList:
        def __init__(self, comm): ...
        def add_link(self, link, rank_in=None, rank_out=None): ...

    class datasets:
        def create_empty_dataset(dataset): ...

    class extensions:
        def AllreducePersistent(model, comm): ...
        # Promised by DESIGN.md.
        def multi_node_snapshot(comm, snapshot, replica_sets): ...
        def ObservationAggregator(comm, original_key, aggregated_key=None): ...
        def MultiNodeEarlyStoppingTrigger(
            comm,
            check_trigger=(1, "epoch"),
            monitor="main/loss",
            patience=...,
            mode="auto",
            verbose=False,
            max_trigger=(100, "epoch"),
        ): ...
        def GenericMultiNodeEvaluator(
            comm, iterator, target, device=None, converter=..., root=0
        ): ...

    class functions:
        def send(x, communicator, rank, tag=0): ...
        def recv(
            communicator, rank, delegate_variable=None, tag=0, force_tuple=False
        ): ...
        def pseudo_connect(delegate_variable, *actual_variables): ...
        def bcast(comm, x, root=0): ...
        def gather(comm, x, root=0): ...
        def scatter(comm, xs, root=0): ...
        def alltoall(comm, xs): ...
        def allgather(comm, x): ...
        # DESIGN.md and issues: beyond spec/.
        def allreduce(comm, x): ...
        def reduce_scatter(comm, xs): ...

    class global_except_hook:
        def add_hook(): ...

    class iterators:
        def create_multi_node_iterator(
            actual_iterator, communicator, rank_master=0
        ): ...
        def create_synchronized_iterator(actual_iterator, communicator): ...
        # Ours, for the tip in spec/ on MultiprocessIterator, and for resuming with one.
        def use_forkserver(): ...
        def ResumableOrderSampler(seed=None): ...

    class links:
        def MultiNodeChainList(comm): ...  # where Chainer 7 has it too
        def MultiNodeBatchNormalization(
            size,
            comm,
            decay=0.9,
            eps=2e-05,
            dtype=...,  # np.float32, which None is where nothing is configured
            use_gamma=True,
            use_beta=True,
            initial_gamma=None,
            initial_beta=None,
            communication_backend="auto",
        ): ...
        # Not in spec/, but asked for by issues.
        def create_mnbn_model(link, comm, communication_backend="auto"): ...
        def ColumnParallelLinear(in_size, out_size, comm): ...
        def RowParallelLinear(in_size, out_size, comm): ...


def callables(
    documented: Any = Documented, path: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, each in vars(documented).items():
        if inspect.isfunction(each) and name != "__init__":
            yield path + name, each
        elif inspect.isclass(each):
            yield from callables(each, f"{path}{name}.")
            if "__init__" in vars(each):
                yield path + name, each


@pytest.mark.parametrize(("path", "documented"), list(callables()))
def test_parameters_are_those_documented(path, documented):
    parameters = list(
        inspect.signature(attrgetter(path)(chainermn)).parameters.values()
    )
    expected = list(inspect.signature(documented).parameters.values())
    assert len(parameters) >= len(expected)
    for theirs, ours in zip(expected, parameters, strict=False):
        assert (ours.name, ours.kind) == (theirs.name, theirs.kind)
        if theirs.default not in (..., theirs.empty):
            assert ours.default == theirs.default
            assert type(ours.default) is type(theirs.default)
    for ours in parameters[len(expected) :]:
        variable = ours.kind in (ours.VAR_KEYWORD, ours.VAR_POSITIONAL)
        assert variable or ours.default is not ours.empty, f"{ours.name} is required"


def test_where_a_process_is_can_be_asked():
    for name in PLACE.split():
        assert isinstance(getattr(chainermn.CommunicatorBase, name), property), name


@pytest.mark.parametrize("name", ["global_except_hook", *MODULES.split()])
def test_module_is_reached_from_the_package_and_exports_what_it_says(name):
    module = importlib.import_module(f"chainermn.{name}")
    assert getattr(chainermn, name) is module
    assert name in chainermn.__all__
    assert module.__name__ == f"chainermn.{name}"
    assert set(module.__all__) <= set(dir(module))


def test_the_package_bears_its_name_and_the_version_of_its_distribution():
    assert chainermn.__name__ == "chainermn"
    assert not [
        module for module in sys.modules if module.startswith("chainermn_facade")
    ]
    assert chainermn.__version__ == metadata.version("chainermn")


@pytest.fixture(scope="module")
def comm():
    """The communicator of a program that was started without mpiexec."""
    with chainermn.create_communicator("naive") as comm:
        yield comm


NAMES = (
    "naive flat hierarchical two_dimensional single_node non_cuda_aware dummy pure_nccl"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_communicator_is_known_by_name(name, comm):
    """Without a warning; and pure_nccl says so where there is no GPU."""
    with contextlib.ExitStack() as stack:
        if name == "pure_nccl" and not chainer.backends.cuda.available:
            stack.enter_context(pytest.raises(ValueError, match="GPU"))
        assert (
            stack.enter_context(chainermn.create_communicator(name)).size == comm.size
        )


def test_checkpointer_has_the_methods_documented(comm, tmp_path):
    made = chainermn.create_multi_node_checkpointer("run", comm, path=str(tmp_path))
    maybe_load, save = inspect.signature(made.maybe_load), inspect.signature(made.save)
    assert maybe_load.bind("trainer", "optimizer").arguments.keys() >= {
        "trainer",
        "optimizer",
    }
    assert maybe_load.bind("trainer").arguments.keys() == {"trainer"}
    assert save.bind("target", iteration=1).arguments.keys() == {"target", "iteration"}
    assert save.bind("target").arguments.keys() == {"target"}
