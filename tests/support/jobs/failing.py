"""Scripts of which some ranks end in failure, and what is checked of the job afterwards."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.jobs.runner import PRELUDE, Job, run_text

# The others outlast any job here that doesn't end by itself.
OTHERS_STAY = 1000.0

# What the statements of `ENDS` need.
MODULES = "import ctypes, os, signal, sys, threading, time\n"
START = f"""{PRELUDE}
{MODULES}
from mpi4py import MPI
world = MPI.COMM_WORLD
def say_failing():  # without this package, which the environments of some jobs don't have
    print("failing at", time.time(), flush=True)
"""
# Rank `failing` ends, when all have come so far, as `end` says; the others do as
# `others` say.
BODY = f"""
def wait():
    deadline = time.time() + {OTHERS_STAY}
    if others == "barrier":
        world.Barrier()
    elif others == "sleep":
        time.sleep({OTHERS_STAY})
    else:
        while time.time() < deadline:
            pass

def fail():
    say_failing()
    exec(end)

world.Barrier()
if world.rank in failing:
    fail()
else:
    wait()
"""
ADD_HOOK = "from chainermn_comm.faults import abort; abort.add_hook()\n"
ALONE = """from chainermn_comm import create_communicator
create_communicator("naive", world.Split(world.rank == world.size - 1))
"""
COMMUNICATOR = (
    "from chainermn_comm import create_communicator; create_communicator('naive')\n"
)


@dataclass(frozen=True)
class End:
    """How a rank ends in failure.

    Attributes:
        statement: what it does then.
        status: of the job; None if it isn't promised.
        words: how the last lines begin that the job says, in their order, of the
            failing `rank` and the number of `ranks`.
    """

    statement: str
    status: int | None = None
    words: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """The line that names the rank."""
        return next(word for word in self.words if word.startswith("ChainerMN"))


RAISE = "raise RuntimeError('planted')"
TRACEBACK = (
    "Traceback",
    "RuntimeError: planted",
    "ChainerMN: rank {rank} of {ranks}: uncaught RuntimeError, ending the job",
    "Next step: fix the error above",
)
EXIT_3 = ("ChainerMN: rank {rank} of {ranks}: sys.exit(3)", "Next step: ")
INTERRUPTED = (
    "Traceback",
    "KeyboardInterrupt",
    "ChainerMN: rank {rank} of {ranks}: uncaught KeyboardInterrupt",
    "Next step: start it again",
)
MESSAGE = ("no", "ChainerMN: rank {rank} of {ranks}: sys.exit with a message")
LEFT = "ChainerMN: rank {rank} of {ranks}: os._exit"
# By name; the tests of faults/, of the hosts, of chaos and of the promises of time have
# them.
ENDS = {
    "exception": End(RAISE, 1, TRACEBACK),
    "interrupt": End(
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", 130, INTERRUPTED
    ),
    "sys.exit": End("sys.exit(3)", 3, EXIT_3),
    "SystemExit": End("raise SystemExit(3)", 3, EXIT_3),
    "message": End("sys.exit('no')", 1, MESSAGE),
    "os._exit": End("os._exit(3)", 3, (LEFT + "(3)",)),
    "early success": End("os._exit(0)", 1, (LEFT + "(0)",)),
    "SIGTERM": End("os.kill(os.getpid(), signal.SIGTERM)"),
    "SIGKILL": End("os.kill(os.getpid(), signal.SIGKILL)"),
    "SIGSEGV": End("ctypes.string_at(0)"),
}


def text(
    end: str = "",
    others: str = "barrier",
    failing: tuple[int, ...] = (1,),
    install: str = ADD_HOOK,
    body: str = BODY,
) -> str:
    """A script; what it does, see BODY."""
    return f"{START}{install}end, others, failing = {end!r}, {others!r}, {failing!r}\n{body}"


def script(folder: Path, *arguments, **options) -> Path:
    """The path of a script that `text` makes of these arguments."""
    path = folder / "script.py"
    path.write_text(text(*arguments, **options))
    return path


def failed(
    ranks: int,
    code: int | None,
    words: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    **options,
) -> Job:
    """The job of a script that `text` makes; it has ended with this status and these last words."""
    job = run_text(ranks, text(**options), environment=environment)
    check_ended(job, code)
    if words:
        (*_, rank) = options.get("failing", (1,))
        check_last_words(job, *worded(words, rank, ranks))
    return job


def worded(words: tuple[str, ...], rank: int, ranks: int) -> list[str]:
    """The words of an `End` about this rank of so many."""
    return [word.format(rank=rank, ranks=ranks) for word in words]


def check_ended(job: Job, code: int | None = None):
    """The job ended because of the failure, with this exit status (None: anything but success)."""
    assert job.returncode not in (0, None), job
    assert seconds_since_failure(job) >= 0, job
    assert code is None or job.returncode == code, job


def seconds_since_failure(job: Job) -> float:
    """From the last rank's failure, which it recorded itself, to the end of mpiexec."""
    failed = re.findall(r"failing at (\S+)", job.out)
    assert failed, job
    return job.ended - float(failed[-1])


def check_last_words(job: Job, *lines: str):
    """Those lines stand in that order, with nothing after them but what the launcher adds."""
    words = [line for line in job.err.splitlines() if line.strip()]
    position = -1
    for line in lines:
        later = [
            i for i, word in enumerate(words) if i > position and word.startswith(line)
        ]
        assert later, f"{line!r} is missing\n{job}"
        position = later[-1]
    rest = "\n".join(words[position + 1 :])
    assert "Traceback" not in rest, job
    assert "ChainerMN" not in rest, job
