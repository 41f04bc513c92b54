"""docs/inside.md names files of the code, and its walks never go back to one.

Compared with a run are "One gradient", "The first update", "One message", "A rank
raises" (on the rank that raises) and "One checkpoint": they name all files that run,
and no others. The other sections are compared with no run.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.jobs import run_text

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "inside.md"
# Those of the start-up take part in imports, whenever one may be.
ALL_FILES = map(str, (ROOT / "packages").glob("*/src/**/*.py"))
FILES = [path for path in ALL_FILES if "/_chainermn_startup/" not in path]
NAMES = re.compile(r"`([\w/]+\.py)`")
STEP = re.compile(r"^\d+\. ", re.MULTILINE)
WALKS = (
    "One gradient",
    "One message",
    "A rank raises",
    "The end of a job",
    "One run of the doctor",
    "One checkpoint",
)

# Runs on rank 1, whose files are written where the first argument says.
RAISES = """
import sys
from pathlib import Path
import chainermn

comm = chainermn.create_communicator()
file = Path(sys.argv[1]).open("w", buffering=1)
comm.bcast_obj(None)  # so that all have come so far
if comm.rank == 1:
    sys.setprofile(lambda frame, *_: file.write(f"{frame.f_code.co_filename}\\n"))
    raise ZeroDivisionError("planted")
comm.allreduce(1.0)
"""


def sections() -> dict[str, str]:
    """Each heading and the text up to the next one."""
    pieces = re.split(r"^#+ (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def files_of(name: str) -> list[str]:
    return [path for path in FILES if path.endswith(f"/{name}")]


def named_in(text: str) -> set[str]:
    """The files that a text names."""
    return {path for name in NAMES.findall(text) for path in files_of(name)}


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """The files of ours that meanwhile run, in order, in this thread and in new ones."""
    files: list[str] = []
    unseen = set(FILES)

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename in unseen
            and code.co_name != "<module>"
        ):
            unseen.remove(code.co_filename)
            files.append(code.co_filename)

    before, before_in_threads = sys.getprofile(), threading.getprofile()
    gc.disable()  # garbage is that of other tests
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield files
    finally:
        sys.setprofile(before)
        threading.setprofile(before_in_threads)
        gc.enable()


def on_any(comm: Any, files: list[str]) -> set[str]:
    """The files that ran on any rank (collective)."""
    return set().union(*comm.allgather_obj(files))


def assert_named(
    heading: str, ran: Collection[str], named_before: Collection[str] = ()
) -> None:
    """The section names all files that ran, and no others; some were named before."""
    named = named_in(sections()[heading])
    assert sorted(set(ran) - named - set(named_before)) == []  # not named
    assert sorted(named - set(ran)) == []  # don't run


def test_each_file_that_is_named_is_one_of_the_code():
    named = set(NAMES.findall(PAGE.read_text()))
    assert not {name: files_of(name) for name in named if len(files_of(name)) != 1}


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_never_goes_back(heading):
    """To a file that an earlier step was about."""
    named = [named_in(step) for step in STEP.split(sections()[heading])[1:]]
    assert len(named) > 1
    before = [set().union(*named[:number]) for number in range(len(named))]
    assert not [
        both for seen, now in zip(before, named, strict=True) if (both := seen & now)
    ]


def test_a_rank_raises(tmp_path):
    run_text(2, RAISES, tmp_path / "files")
    ran = {
        path for path in (tmp_path / "files").read_text().split("\n") if path in FILES
    }
    # Another way to end, which Python 3.11 doesn't look at here.
    assert_named("A rank raises", [*ran, *files_of("faults/exit_status.py")])


@pytest.fixture
def comm(world):
    from chainermn_comm import create_communicator

    made = create_communicator("hierarchical", world)
    yield made
    made.finalize()


@pytest.fixture
def make_updater(comm):
    """Makes updaters of a small model, whose weights differ from rank to rank."""
    from chainer import datasets, iterators, links, optimizers, training

    from chainermn_train import create_multi_node_optimizer

    def make():
        model = links.Classifier(links.Linear(20, 3, initialW=comm.rank))
        optimizer = create_multi_node_optimizer(optimizers.Adam(), comm).setup(model)
        examples = datasets.TupleDataset(np.ones((4, 20), "f4"), np.zeros(4, "i4"))
        return training.StandardUpdater(
            iterators.SerialIterator(examples, 2), optimizer
        )

    return make


@pytest.mark.world
@pytest.mark.sizes(2)
def test_one_gradient(comm, make_updater):
    optimizer = make_updater().get_optimizer("main")
    update = optimizer.target, np.ones((4, 20), "f4"), np.zeros(4, "i4")
    with recorded() as first:
        optimizer.update(*update)
    with recorded() as later:
        optimizer.update(*update)
    assert_named("One gradient", on_any(comm, later))
    assert_named("The first update", on_any(comm, first), named_before=later)
    steps = [named_in(step) for step in STEP.split(sections()["One gradient"])[1:-1]]
    order = [
        number for path in later for number, step in enumerate(steps) if path in step
    ]
    assert order == sorted(order)


@pytest.mark.world
@pytest.mark.sizes(2)
def test_one_message(comm):
    import chainer

    from chainermn_modelparallel import recv, send

    with recorded() as ran:
        if comm.rank == 0:
            send(chainer.Variable(np.ones(3, "f4")), comm, 1).backward()
        else:
            chainer.functions.sum(recv(comm, 0)).backward()
    assert_named("One message", on_any(comm, ran))


@pytest.mark.world
@pytest.mark.sizes(2)
def test_one_checkpoint(comm, make_updater, tmp_path):
    from chainermn_train import create_multi_node_checkpointer

    checkpointer = create_multi_node_checkpointer(
        "run", comm, path=comm.bcast_obj(tmp_path)
    )
    updater, resumed = make_updater(), make_updater()
    updater.update()
    with recorded() as ran:
        checkpointer.save(updater)
        assert checkpointer.maybe_load(resumed) == 1
    checkpointer.finalize()
    assert_named("One checkpoint", on_any(comm, ran))
