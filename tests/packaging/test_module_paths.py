"""Every public name can be imported from wherever ChainerMN 1.x or Chainer 5 to 7 had it."""

import importlib
import re
import subprocess
import sys
from importlib import metadata

import chainer
import chainermn
import pytest

from tests.support.jobs import commands
from tests.support.jobs.scripts import ROOT

# By module, below `chainermn`.
PATHS = {
    "communicators": "CommunicatorBase create_communicator",
    "communicators._base": "CommunicatorBase",
    "communicators.communicator_base": "CommunicatorBase",
    "communicators.mpi_communicator_base": "MpiCommunicatorBase",
    "communicators.naive_communicator": "NaiveCommunicator",
    "communicators.flat_communicator": "FlatCommunicator",
    "communicators.hierarchical_communicator": "HierarchicalCommunicator",
    "communicators.two_dimensional_communicator": "TwoDimensionalCommunicator",
    "communicators.single_node_communicator": "SingleNodeCommunicator",
    "communicators.non_cuda_aware_communicator": "NonCudaAwareCommunicator",
    "communicators.pure_nccl_communicator": "PureNcclCommunicator",
    "communicators.dummy_communicator": "DummyCommunicator",
    "datasets": "create_empty_dataset scatter_dataset scatter_index",
    "datasets.scatter_dataset": "DataSizeError get_epoch_trigger get_n_iterations_for_one_epoch "
    "scatter_dataset scatter_index",
    "datasets.scatter": "DataSizeError get_epoch_trigger get_n_iterations_for_one_epoch "
    "scatter_dataset scatter_index",
    "datasets.empty_dataset": "create_empty_dataset",
    "extensions": "AllreducePersistent GenericMultiNodeEvaluator MultiNodeEarlyStoppingTrigger "
    "ObservationAggregator create_multi_node_checkpointer create_multi_node_evaluator "
    "multi_node_snapshot",
    "extensions.allreduce_persistent": "AllreducePersistent",
    "extensions.checkpoint": "create_multi_node_checkpointer",
    "extensions.multi_node_evaluator": "GenericMultiNodeEvaluator create_multi_node_evaluator",
    "extensions.multi_node_early_stopping_trigger": "MultiNodeEarlyStoppingTrigger",
    "extensions.observation_aggregator": "ObservationAggregator",
    "extensions._multi_node_snapshot": "multi_node_snapshot",
    "evaluators": "create_multi_node_evaluator",
    "functions": "allgather alltoall bcast gather pseudo_connect recv scatter send",
    "functions.batch_normalization": "get_communication_backend",
    "functions.collective_communication": "allgather alltoall bcast gather scatter",
    "functions.point_to_point_communication": "recv send",
    "functions.pseudo_connect": "pseudo_connect",
    "global_except_hook": "add_hook",
    "iterators": "create_multi_node_iterator create_synchronized_iterator",
    "iterators.multi_node_iterator": "create_multi_node_iterator",
    "iterators.synchronized_iterator": "create_synchronized_iterator",
    "links": "MultiNodeBatchNormalization MultiNodeChainList create_mnbn_model "
    "create_multi_node_n_step_rnn",
    "links.batch_normalization": "MultiNodeBatchNormalization",
    "links.create_mnbn_model": "create_mnbn_model",
    "links.multi_node_chain_list": "MultiNodeChainList",
    "links.n_step_rnn": "create_multi_node_n_step_rnn",
    "optimizers": "create_multi_node_optimizer",
    "nccl": "",
    "testing": "get_device",
    "testing.device": "get_device",
}


def runs(script):
    """Whether the script ends well in an interpreter of its own."""
    return subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_each_can_be_the_first_import():
    lines = [
        f"from chainermn.{path} import {', '.join(names.split())}"
        for path, names in PATHS.items()
        if names
    ]
    script = (
        "import subprocess, sys, chainer, chainermn_train, chainermn_modelparallel\n"
        f"for line in {lines!r}:\n"
        "    exec(line)\n"
        "    for name in [each for each in sys.modules if each.split('.')[0] == 'chainermn']:\n"
        "        del sys.modules[name]\n"
    )
    assert runs(script)


def test_a_module_is_reached_from_the_package_without_an_import_of_its_own():
    script = (
        "import chainermn as c\n"
        "c.communicators.naive_communicator.NaiveCommunicator\n"
        "c.evaluators.create_multi_node_evaluator\n"
        "c.testing.device.get_device, c.nccl._available\n"
        "assert not hasattr(c.communicators, 'no_such') and not hasattr(c, 'nothing')\n"
    )
    assert runs(script)


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("communicators._memory_utility", "multi_node_mean_grad"),
        ("communicators._communication_utility", "inter_rank"),
    ],
)
@pytest.mark.parametrize("how", ["import chainermn.{}", "from chainermn.{} import {}"])
def test_what_is_left_out_says_so_and_what_to_use_instead(path, remedy, how):
    parent, _, name = path.rpartition(".")
    if "from" in how:
        words = (parent, name)
    else:
        words = (path,)
    statement = how.format(*words)
    words = rf"^chainermn\.{path} is left out: .*{remedy}"
    with pytest.raises(ImportError, match=words) as caught:
        exec(statement)
    assert caught.value.name == f"chainermn.{path}"
    assert f"`{name}`" in (ROOT / "docs" / "moving.md").read_text()


def test_the_class_that_programs_derive_from_is_no_public_name():
    from chainermn.optimizers import _MultiNodeOptimizer

    assert _MultiNodeOptimizer.__name__ == "_MultiNodeOptimizer"
    assert "_MultiNodeOptimizer" not in chainermn.optimizers.__all__


def test_the_package_bears_its_name_and_the_version_of_its_distribution():
    assert chainermn.__name__ == "chainermn"
    assert chainermn.__version__ == metadata.version("chainermn")


def test_nothing_else_is_found():
    with pytest.raises(
        ModuleNotFoundError, match=r"chainermn\.communicators\.fast_communicator"
    ):
        importlib.import_module("chainermn.communicators.fast_communicator")
    with pytest.raises(ModuleNotFoundError, match=r"chainermn\.kernels"):
        importlib.import_module("chainermn.kernels")


TYPED = """
import chainermn
import chainermn.nccl
reveal_type(chainermn.create_communicator('naive').rank)
reveal_type(chainermn.__version__)
reveal_type(chainermn.global_except_hook.add_hook)
reveal_type(chainermn.nccl._available)
reveal_type(chainermn.nccl.get_version)
"""
WRONG = """
chainermn.no_such_name
chainermn.create_communicator(no_such_argument=1)
"""


def test_type_checkers_see_them_all_and_what_there_is_not(everything, tmp_path):
    lines = []
    for path, names in PATHS.items():
        for name in names.split():
            lines += [f"from chainermn.{path} import {name} as x{len(lines)}"]
            lines += [f"reveal_type(x{len(lines) - 1})"]
    (tmp_path / "script.py").write_text(TYPED + "\n".join(lines) + WRONG)
    mypy = (sys.executable, "-m", "mypy", "--python-executable", everything.python)
    how = ("--strict", "--config-file=", "script.py")
    told = commands.run(*mypy, *how, cwd=tmp_path).stdout
    assert told.count("Revealed type") == 5 + len(lines) / 2, told
    assert 'Revealed type is "Any"' not in told
    assert re.findall('Revealed type is "(?:builtins.)?(int|str)"', told)[:2] == [
        "int",
        "str",
    ]
    errors = [line for line in told.splitlines() if "error:" in line]
    assert len(errors) == 2, told
    assert 'no attribute "no_such_name"' in errors[0]
    assert '"no_such_argument" for "create_communicator"' in errors[1]


def test_nccl_is_that_of_cupy_where_there_is_one(tmp_path):
    folder = tmp_path / "cupy" / "cuda"
    folder.mkdir(parents=True)
    (tmp_path / "cupy/__init__.py").write_text("ndarray = type('ndarray', (), {})\n")
    (folder / "__init__.py").write_text("")
    (folder / "nccl.py").write_text(
        "NCCL_SUM, NCCL_FLOAT = 0, 7\n"
        "def get_version(): return 22703\n"
        "def get_build_version(): return 22702\n"
    )
    script = (
        "import chainermn; assert not chainermn.nccl._available\n"  # no GPU here
        "import sys; del sys.modules['chainermn.nccl']\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from chainermn import nccl\n"
        "assert nccl._available, nccl\n"
        "assert (nccl.get_version(), nccl.get_build_version()) == (22703, 22702)\n"
        "assert (nccl.NCCL_SUM, nccl.NCCL_FLOAT) == (0, 7)\n"
    )
    script = script.replace(
        "from chainermn import nccl", "import chainermn.nccl as nccl"
    )
    assert runs(script)


def test_devices_for_tests():
    from chainermn.testing import get_device

    assert get_device() == chainer.get_device("@numpy")
    if not chainer.backends.cuda.available:
        with pytest.raises(RuntimeError, match="CUDA"):
            get_device(0)
    if not chainer.chainerx.is_available():
        with pytest.raises(RuntimeError, match="native:0"):
            get_device(use_chainerx=True)
        with pytest.raises(RuntimeError, match="cuda:1"):
            get_device(1, use_chainerx=True)
