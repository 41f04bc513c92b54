"""Every name that ChainerMN documents is there, takes what it takes, in the same order.

One row a name, as the API reference has it (the manual of 1.3 where only that has it). Where the
reference gives a default, ours is the same; where it gives none, ours may have one. Parameters
that ours adds come after the documented ones and have defaults.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from typing import Any

import numpy as np
import pytest

REQUIRED = inspect.Parameter.empty
MODULES = [
    "communicators",
    "datasets",
    "extensions",
    "functions",
    "global_except_hook",
    "iterators",
    "links",
    "optimizers",
]


def row(path: str, *parameters: Any) -> Any:
    """`path`: module and name. A parameter is a name, or a name and its default."""
    pairs = [(p, REQUIRED) if isinstance(p, str) else p for p in parameters]
    return pytest.param(path, pairs, id=path)


CALLABLES = [
    row(
        "chainermn:create_communicator",
        ("communicator_name", "hierarchical"),
        ("mpi_comm", None),
        ("allreduce_grad_dtype", None),
        ("batched_copy", False),
    ),
    row("chainermn:CommunicatorBase.allreduce", "data"),
    row("chainermn:CommunicatorBase.allreduce_grad", "model"),
    row("chainermn:CommunicatorBase.allreduce_obj", "obj"),
    row("chainermn:CommunicatorBase.alltoall", "xs"),
    row("chainermn:CommunicatorBase.bcast", "data", ("max_buf_len", None), ("root", 0)),
    row("chainermn:CommunicatorBase.bcast_data", "model"),
    row("chainermn:CommunicatorBase.bcast_obj", "obj", ("max_buf_len", None), ("root", 0)),
    row("chainermn:CommunicatorBase.gather", "data", ("root", 0)),
    row("chainermn:CommunicatorBase.gather_obj", "obj", ("root", 0)),
    row("chainermn:CommunicatorBase.recv", "source", "tag"),
    row("chainermn:CommunicatorBase.recv_obj", "source", "tag"),
    row("chainermn:CommunicatorBase.send", "data", "dest", "tag"),
    row("chainermn:CommunicatorBase.send_obj", "obj", "dest", "tag"),
    row("chainermn:CommunicatorBase.split", "color", "key"),
    row(
        "chainermn:create_multi_node_optimizer",
        "actual_optimizer",
        "communicator",
        ("double_buffering", False),
        ("zero_fill", True),  # DESIGN.md
    ),
    row("chainermn:create_multi_node_evaluator", "actual_evaluator", "communicator"),
    row(
        "chainermn:scatter_dataset",
        "dataset",
        "comm",
        ("root", 0),
        ("shuffle", False),
        ("seed", None),
        ("max_buf_len", 268435456),
    ),
    row("chainermn.datasets:create_empty_dataset", "dataset"),
    row("chainermn:MultiNodeChainList", "comm"),
    row("chainermn.links:MultiNodeChainList", "comm"),  # where Chainer 7 has it too
    row(
        "chainermn:MultiNodeChainList.add_link",
        "link",
        ("rank_in", None),
        ("rank_out", None),
    ),
    row(
        "chainermn.links:MultiNodeBatchNormalization",
        "size",
        "comm",
        ("decay", 0.9),
        ("eps", 2e-05),
        ("dtype", np.float32),
        ("use_gamma", True),
        ("use_beta", True),
        ("initial_gamma", None),
        ("initial_beta", None),
        ("communication_backend", "auto"),
    ),
    # Not in spec/, but asked for by issues.
    row("chainermn.links:create_mnbn_model", "link", "comm", ("communication_backend", "auto")),
    row("chainermn.links:ColumnParallelLinear", "in_size", "out_size", "comm"),
    row("chainermn.links:RowParallelLinear", "in_size", "out_size", "comm"),
    row("chainermn.functions:send", "x", "communicator", "rank", ("tag", 0)),
    row(
        "chainermn.functions:recv",
        "communicator",
        "rank",
        ("delegate_variable", None),
        ("tag", 0),
        ("force_tuple", False),
    ),
    row("chainermn.functions:pseudo_connect", "delegate_variable", "*actual_variables"),
    row("chainermn.functions:bcast", "comm", "x", ("root", 0)),
    row("chainermn.functions:gather", "comm", "x", ("root", 0)),
    row("chainermn.functions:scatter", "comm", "xs", ("root", 0)),
    row("chainermn.functions:alltoall", "comm", "xs"),
    row("chainermn.functions:allgather", "comm", "x"),
    row("chainermn.functions:allreduce", "comm", "x"),  # DESIGN.md and issues: beyond spec/
    row("chainermn.functions:reduce_scatter", "comm", "xs"),
    row(
        "chainermn.iterators:create_multi_node_iterator",
        "actual_iterator",
        "communicator",
        ("rank_master", 0),
    ),
    row(
        "chainermn.iterators:create_synchronized_iterator",
        "actual_iterator",
        "communicator",
    ),
    row("chainermn.extensions:AllreducePersistent", "model", "comm"),
    *(
        row(
            f"chainermn:{name}",
            "name",
            "comm",
            ("cp_interval", 5),
            ("gc_interval", 5),
            ("path", None),
        )
        for name in ("create_multi_node_checkpointer", "create_multi_node_checkpoint")
    ),
    row("chainermn.global_except_hook:add_hook"),
    # Not in spec/, but promised by DESIGN.md for scripts written for Chainer 7.
    row("chainermn:CommunicatorBase.multi_node_mean_grad", "model", ("zero_fill", False)),
    row("chainermn:CommunicatorBase.multi_node_mean", "sendbuf", "recvbuf"),
    row("chainermn:CommunicatorBase.set_config", "name"),
    row("chainermn:CommunicatorBase.get_config"),
    row("chainermn:CommunicatorBase.finalize"),
    row("chainermn.extensions:multi_node_snapshot", "comm", "snapshot", "replica_sets"),
    row(
        "chainermn.extensions:ObservationAggregator",
        "comm",
        "original_key",
        ("aggregated_key", None),
    ),
    row(
        "chainermn.extensions:MultiNodeEarlyStoppingTrigger",
        "comm",
        ("check_trigger", (1, "epoch")),
        ("monitor", "main/loss"),
        "patience",
        ("mode", "auto"),
        ("verbose", False),
        ("max_trigger", (100, "epoch")),
    ),
    row(
        "chainermn.extensions:GenericMultiNodeEvaluator",
        "comm",
        "iterator",
        "target",
        ("device", None),
        "converter",
        ("root", 0),
    ),
    row("chainermn:scatter_index", "n_total_samples", "comm"),
    row("chainermn:create_empty_dataset", "dataset"),
    # Ours, for the tip in spec/ on MultiprocessIterator, and for resuming with one.
    row("chainermn.iterators:use_forkserver"),
    row("chainermn.iterators:ResumableOrderSampler", ("seed", None)),
]


def resolve(path: str) -> Any:
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("path", "documented"), CALLABLES)
def test_parameters_are_those_documented(path, documented):
    parameters = list(inspect.signature(resolve(path)).parameters.values())
    if "CommunicatorBase." in path or "MultiNodeChainList.add_link" in path:
        assert parameters.pop(0).name == "self"
    for (name, default), ours in zip(documented, parameters, strict=False):
        if name.startswith("*"):
            assert ours.kind is inspect.Parameter.VAR_POSITIONAL
        else:
            assert ours.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert ours.name == name.lstrip("*")
        if default is not REQUIRED:
            assert ours.default == default
            assert type(ours.default) is type(default)
    assert len(parameters) >= len(documented)
    for ours in parameters[len(documented) :]:
        variable = ours.kind in (ours.VAR_KEYWORD, ours.VAR_POSITIONAL)
        assert variable or ours.default is not REQUIRED, f"{ours.name} is required"


@pytest.mark.parametrize(
    "name", ["rank", "size", "intra_rank", "inter_rank", "inter_size", "intra_size", "mpi_comm"]
)
def test_where_a_process_is_can_be_asked(name):
    assert isinstance(resolve(f"chainermn:CommunicatorBase.{name}"), property)


@pytest.mark.parametrize(
    "name",
    MODULES,
)
def test_module_is_reached_from_the_package_and_exports_what_it_says(name):
    module = importlib.import_module(f"chainermn.{name}")
    assert getattr(importlib.import_module("chainermn"), name) is module
    assert module.__name__ == f"chainermn.{name}"
    for exported in module.__all__:
        assert hasattr(module, exported)


@pytest.fixture(scope="module")
def comm():
    """The communicator of a program that was started without mpiexec."""
    with importlib.import_module("chainermn").create_communicator("naive") as comm:
        yield comm


NAMES = "naive flat hierarchical two_dimensional single_node non_cuda_aware dummy"


@pytest.mark.parametrize("name", NAMES.split())
def test_communicator_is_known_by_name(name, comm):
    create_communicator = importlib.import_module("chainermn").create_communicator
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="using naive communicator")
        with create_communicator(name) as made:
            assert made.size == comm.size


def test_pure_nccl_is_known_by_name(comm):
    """It says so where there is no GPU."""
    create_communicator = importlib.import_module("chainermn").create_communicator
    with contextlib.ExitStack() as stack:
        if not importlib.import_module("chainer").backends.cuda.available:
            stack.enter_context(pytest.raises(ValueError, match="GPU"))
        assert stack.enter_context(create_communicator("pure_nccl")).size == comm.size


def test_double_buffering(comm):
    import chainer
    import chainermn

    optimizer = chainer.optimizers.SGD()
    made = chainermn.create_multi_node_optimizer(optimizer, comm, double_buffering=True)
    assert made.setup(chainer.Link()) is made


def test_checkpointer_has_the_methods_documented(comm, tmp_path):
    import chainermn

    checkpointer = chainermn.create_multi_node_checkpointer("run", comm, path=str(tmp_path))
    maybe_load = inspect.signature(checkpointer.maybe_load)
    save = inspect.signature(checkpointer.save)
    assert maybe_load.bind("trainer", "optimizer").arguments.keys() >= {"trainer", "optimizer"}
    assert maybe_load.bind("trainer").arguments.keys() == {"trainer"}
    assert save.bind("target", iteration=1).arguments.keys() == {"target", "iteration"}
    assert save.bind("target").arguments.keys() == {"target"}
