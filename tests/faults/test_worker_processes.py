"""Worker processes of a rank run beside it, however they start, and never start MPI."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from tests.support.jobs.commands import run
from tests.support.jobs.runner import run_text
from tests.support.jobs.scripts import ROOT
from tests.support.plugins.pairwise import in_full

PUBLIC = re.compile(r"^::: (chainermn_\w+(?:\.[a-z]\w*)*)\.\w+$", re.M)

FIRST_TO_IMPORT_MPI = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "mpi4py.MPI" in sys.modules:
        sys.exit(f"{name} starts MPI")
"""


def public_modules():
    """Those of the facade, and those that the API reference names."""
    table = runpy.run_path(str(ROOT / "src" / "chainermn_facade" / "_table.py"))
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    found = {name for page in pages for name in PUBLIC.findall(page.read_text())}
    return [
        "chainermn",
        *(f"chainermn.{path}" for path in table["SOURCES"]),
        *sorted(found),
    ]


def test_an_import_of_a_public_module_starts_no_mpi():
    names = public_modules()
    assert {"chainermn.communicators.naive_communicator", "chainermn_train"} < set(
        names
    )
    done = run(sys.executable, "-c", FIRST_TO_IMPORT_MPI, *names)
    assert done.returncode == 0
    assert done.stderr == ""


# As a script of spec/tips_faqs: `import chainermn` at the top, which workers import again.
SCRIPT = """
import multiprocessing, sys
import numpy as np
from chainer.iterators import MultiprocessIterator
import chainermn
{top}

def double(x):
    return 2 * x

def main(method, when):
    if when == "before":
        multiprocessing.set_start_method(method)
    comm = {communicator}
    if when == "after":
        multiprocessing.set_start_method(method)
    dummy = multiprocessing.Process(target=double, args=(1,))
    dummy.start()
    dummy.join()
    with multiprocessing.Pool(1) as pool:
        doubled = pool.map(double, range(4))
    data = [(np.full(3, i, "f4"), i) for i in range(8)] if comm.rank == 0 else None
    part = chainermn.scatter_dataset(data, comm)
    iterator = MultiprocessIterator(part, 2, n_processes=1, shuffle=False)
    labels = [int(label) for _ in range(2) for _, label in next(iterator)]
    iterator.finalize()
    everyone = comm.allgather_obj((dummy.exitcode, doubled, labels))
    if comm.rank == 0:
        print(everyone, flush=True)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""
NAIVE = "chainermn.create_communicator('naive')"
# What the script has at its top, where workers import it, too, and its communicator.
TOPS = {
    "chainermn": ("import chainermn.communicators.naive_communicator", NAIVE),
    "mpi4py.MPI": ("from mpi4py import MPI", NAIVE),
    "a class of ours": (
        "from chainermn.communicators.naive_communicator import NaiveCommunicator",
        "NaiveCommunicator()",
    ),
    "a class of its own": (
        "from mpi4py import MPI\n"
        "from chainermn.communicators import mpi_communicator_base\n"
        "class Own(mpi_communicator_base.MpiCommunicatorBase): pass",
        "Own(MPI.COMM_WORLD)",
    ),
}


# Python's own method is `forkserver` from 3.14 on.
@pytest.mark.ci
@pytest.mark.parametrize(
    ("method", "when", "top"),
    [
        ("forkserver", "before", "chainermn"),
        ("spawn", "after", "mpi4py.MPI"),
        ("fork", "after", "a class of its own"),
        (None, "never", "a class of ours"),
        # Each method before and after the communicator.
        *in_full(
            ("spawn", "before", "a class of its own"),
            ("forkserver", "after", "a class of its own"),
            ("fork", "before", "mpi4py.MPI"),
        ),
    ],
)
def test_workers_run_however_they_are_started(method, when, top):
    imports, communicator = TOPS[top]
    text = SCRIPT.format(top=imports, communicator=communicator)
    job = run_text(2, text, method, when)
    assert job.returncode == 0, job
    parts = [(0, [0, 2, 4, 6], labels) for labels in ([0, 1, 2, 3], [4, 5, 6, 7])]
    assert job.out.splitlines()[-1] == str(parts), job


IN_A_WORKER = {
    "by its name": "chainermn.create_communicator('naive')",
    "by its class": (
        "from chainermn.communicators.naive_communicator import NaiveCommunicator\n"
        "        NaiveCommunicator()"
    ),
    "after mpi4py.MPI": (
        "from mpi4py import MPI\n        chainermn.create_communicator()"
    ),
}
STARTS_MPI = """
import multiprocessing
import chainermn

def work(results):
    try:
        {in_a_worker}
    except RuntimeError as error:
        results.put(str(error))
    else:
        results.put("nothing was raised")

if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    results = context.Queue()
    worker = context.Process(target=work, args=(results,))
    {first}
    {then}
    everyone = comm.allgather_obj(results.get())
    worker.join()
    if comm.rank == 0:
        print(*everyone, sep="\\n", flush=True)
"""
# Whether the worker starts before the communicator is made, or after it.
STARTS = "worker.start()"
MAKES = "comm = chainermn.create_communicator('naive')"
ORDERS = {"before": (f"{STARTS}; worker.join()", MAKES), "after": (MAKES, STARTS)}


@pytest.mark.parametrize(
    ("method", "when", "what"),
    [
        ("spawn", "after", "by its name"),
        ("fork", "before", "by its class"),
        *in_full(("forkserver", "before", "after mpi4py.MPI")),
    ],
)
def test_a_worker_that_makes_a_communicator_raises_and_the_job_goes_on(
    method, when, what
):
    first, then = ORDERS[when]
    text = STARTS_MPI.format(
        in_a_worker=IN_A_WORKER[what], method=method, first=first, then=then
    )
    job = run_text(2, text)
    assert job.returncode == 0, job
    said = job.out.splitlines()[-2:]
    for rank, line in enumerate(said):
        assert line.startswith(f"rank {rank}: "), job
        assert "in a worker process" in line
        assert 'if __name__ == "__main__"' in line


# As a script whose author forgot the `if`: a worker imports all of it again.
WITHOUT_IF = """
import multiprocessing, os, sys
import chainermn
comm = chainermn.create_communicator("naive")
context = multiprocessing.get_context(sys.argv[1])
worker = context.Process(target=os.getpid)
worker.start()
worker.join()
codes = comm.allgather_obj(worker.exitcode)
if comm.rank == 0:
    print(codes, flush=True)
"""


@pytest.mark.ci
@pytest.mark.parametrize("method", ["spawn", *in_full("forkserver")])
def test_a_script_without_its_main_part_is_told_what_it_lacks(method):
    job = run_text(2, WITHOUT_IF, method)
    told = r"RuntimeError: rank [01]: a communicator was to be made in a worker process"
    assert re.search(told, job.err), job
    # From Python 3.14 on, the error may also end the server, and so the job.
    assert job.returncode or job.out.splitlines()[-1] == "[1, 1]", job


NOT_INITIALIZED = """
import mpi4py
mpi4py.rc.initialize = False
import chainermn
from mpi4py import MPI
try:
    chainermn.create_communicator("naive")
except RuntimeError as error:
    print(error, flush=True)
MPI.Init()
comm = chainermn.create_communicator("naive")
assert comm.allreduce_obj(1) == comm.size
comm.finalize()
MPI.Finalize()
try:
    chainermn.create_communicator("naive")
except RuntimeError as error:
    print(error, flush=True)
"""


def test_where_a_script_initializes_mpi_itself_we_say_when_it_has_not():
    job = run_text(2, NOT_INITIALIZED)
    assert job.returncode == 0, job
    assert job.out.count("MPI.Init()") == 2, job
    assert job.out.count("MPI has been finalized") == 2, job
