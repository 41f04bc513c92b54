"""Whether MPI takes GPU memory is asked of MPI itself, by name."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from mpi4py import MPI

from chainermn_comm.gpu import inter_node


@pytest.fixture
def ask():
    """The question, asked anew."""
    inter_node.mpi_takes_gpu_memory.cache_clear()
    yield inter_node.mpi_takes_gpu_memory
    inter_node.mpi_takes_gpu_memory.cache_clear()


def test_the_wheels_of_mpich_and_open_mpi_have_the_query_and_say_no(ask):
    assert hasattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support")
    assert ask() is False


@pytest.mark.parametrize(("answer", "expected"), [(1, True), (0, False), (-1, False)])
def test_the_answer_is_taken(ask, monkeypatch, answer, expected):
    library = SimpleNamespace(MPIX_Query_cuda_support=Mock(return_value=answer))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert ask() is expected


@pytest.mark.parametrize("found", [{"return_value": SimpleNamespace()}, {"side_effect": OSError}])
def test_an_mpi_without_the_query_or_its_library_is_not_aware(ask, monkeypatch, found):
    monkeypatch.setattr(ctypes, "CDLL", Mock(**found))
    assert ask() is False
