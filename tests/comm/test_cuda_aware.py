"""Whether MPI takes GPU memory is asked of MPI itself, by name."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from chainermn_comm import cuda_aware


@pytest.fixture
def ask():
    """The question, asked anew."""
    cuda_aware.mpi_takes_gpu_memory.cache_clear()
    yield cuda_aware.mpi_takes_gpu_memory
    cuda_aware.mpi_takes_gpu_memory.cache_clear()


def test_the_wheels_of_mpich_and_open_mpi_have_the_query_and_say_no(ask):
    from mpi4py import MPI

    assert hasattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support")
    assert ask() is False


class Query:
    def __init__(self, answer: int) -> None:
        self.answer = answer

    def __call__(self) -> int:
        return self.answer


@pytest.mark.parametrize(("answer", "expected"), [(1, True), (0, False), (-1, False)])
def test_the_answer_is_taken(ask, monkeypatch, answer, expected):
    library = SimpleNamespace(MPIX_Query_cuda_support=Query(answer))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert ask() is expected


def test_an_mpi_without_the_query_is_not_aware(ask, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    assert ask() is False


def test_a_library_that_cannot_be_loaded_is_not_aware(ask, monkeypatch):
    def fail(_):
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert ask() is False
