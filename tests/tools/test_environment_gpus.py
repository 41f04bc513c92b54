"""What CuPy says of GPUs."""

import sys
from types import SimpleNamespace

from chainermn_tools.environment import gpus


def test_nccl_is_reported_with_and_without_its_library(monkeypatch):
    """CuPy imports a stub where libnccl is not installed."""
    stub = SimpleNamespace(available=False)
    cuda = SimpleNamespace(nccl=stub)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    assert gpus.nccl() == "absent"
    stub.available = True
    for code, version in ((2708, "2.7.8"), (22203, "2.22.3")):
        stub.get_version = lambda code=code: code
        assert gpus.nccl() == version
