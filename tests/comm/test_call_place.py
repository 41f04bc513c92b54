"""The place of a call is the user's own line, whatever code of ours or of Python's is between."""

from __future__ import annotations

import functools
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chainermn_comm.call_place import place_of_call

SOURCE = """
import contextlib
from chainermn_comm.call_place import place_of_call

def call(): return place_of_call()

@contextlib.contextmanager
def block(found):
    yield
    found.append(place_of_call())
"""


@pytest.fixture(params=["chainermn_train.inner", "chainer", "contextlib"])
def between(request):
    """A module whose frames are not the user's."""
    module = types.ModuleType(request.param)
    exec(compile(SOURCE, "between.py", "exec"), vars(module))
    return module


def test_frames_of_ours_and_of_python_are_passed_over(between):
    name = str(Path(__file__).relative_to(Path.cwd()))
    first = test_frames_of_ours_and_of_python_are_passed_over.__code__.co_firstlineno
    assert between.call() == f"{name}:{first + 3}"
    assert functools.partial(between.call)() == f"{name}:{first + 4}"
    found = []
    with between.block(found):
        pass
    assert found == [f"{name}:{first + 6}"]


def test_where_there_is_no_working_directory_the_path_is_whole(monkeypatch, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert place_of_call().startswith(f"{__file__}:")


def test_a_thread_that_runs_our_code_alone_has_no_place(between):
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(between.call).result() == ""
