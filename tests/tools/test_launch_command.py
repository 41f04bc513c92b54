"""`chainermn launch` with real jobs: good ones, each kind of failure, restarts, Ctrl-C."""

import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import commands
from tests.support.jobs.processes import is_gone, soon
from tests.support.jobs.runner import on_open_mpi
from tests.support.plugins.pairwise import tiered
from tests.support.tools.explained import verdict_on

full = pytest.mark.full


def launch(*arguments: object, **variables: str) -> commands.Done:
    return commands.chainermn("launch", *arguments, **variables)


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


SHOW = """\
import json, os, sys
from mpi4py import MPI
import beside
mine = (sys.argv, __file__, os.environ["OMP_NUM_THREADS"], __name__, beside.VALUE)
everybody = MPI.COMM_WORLD.gather(mine)
if MPI.COMM_WORLD.rank == 0:
    print(json.dumps(everybody))
"""


def test_script_runs_as_python_would_run_it_whatever_its_name_and_arguments(tmp_path):
    folder = tmp_path / "a folder; with 'quotes' \" and $(touch trap)"
    name = script(folder, SHOW, "my script;.py")
    script(folder, "VALUE = 7\n", "beside.py")
    arguments = ["", " ", "a b", "'", ";", "$(touch trap)", "`id`", "*", "-n", ":", "é"]
    done = launch("-n", 2, name, *arguments)
    assert done.returncode == 0, done.stderr
    for argv, file, threads, module, value in json.loads(done.stdout):
        assert [argv, file, module, value] == [
            [str(name), *arguments],
            str(name),
            "__main__",
            7,
        ]
        assert int(threads) >= 1
    assert not list(tmp_path.rglob("trap"))
    # The line that is printed can be pasted, and does the same.
    (said,) = done.stderr.splitlines()
    pasted = said.removeprefix("chainermn launch: ")
    again = commands.run("env", *shlex.split(pasted))
    assert again.stdout == done.stdout, again.stderr


def test_a_dry_run_only_prints_the_command_line(tmp_path):
    logs = ("--log-dir", tmp_path / "logs")
    done = launch("-n", 1, "--dry-run", *logs, "-m", "package.train", "x")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("-m chainermn_tools.rank -m package.train x\n")
    assert not (tmp_path / "logs").exists()


def test_variables_reach_the_ranks_and_each_ranks_output_its_file(tmp_path):
    text = "import os, sys; print(os.environ['OWN']); sys.exit('end')"
    name = script(tmp_path, text)
    logs = tmp_path / "logs"
    for value in ("a, b", "c"):  # which are appended
        done = launch("-n", 2, "--env", f"OWN={value}", "--log-dir", logs, name)
        assert done.returncode == 1
        assert done.stdout == ""
        assert "failed first: sys.exit('end') (exit status 1)" in done.stderr
    for rank in (0, 1):
        lines = (logs / f"rank-{rank}.log").read_text().splitlines()
        assert lines == ["a, b", "end", "c", "end"]


def test_what_happened_is_one_object_and_output_stays_out_of_it(tmp_path):
    name = script(tmp_path, "import sys; print('said'); sys.exit(3)")
    done = launch("-n", 1, "--json", "--max-restarts", 1, name)
    found = json.loads(done.stdout)
    assert done.returncode == found["status"] == 3
    assert (found["success"], found["restarts"], found["hosts"]) == (False, 1, {})
    how = "failed first: sys.exit(3) (exit status 3)"
    assert found["cause"] == f"rank 0 on {socket.gethostname()} {how}"
    assert found["rank"] == 0
    assert found["next_step"] == "read what that rank printed before."
    assert done.stderr.endswith(f"{found['cause']}\nNext step: {found['next_step']}\n")
    assert all(key.isidentifier() and key.islower() for key in found)
    assert found["command"][-1] == str(name)
    assert done.stderr.count("said\n") == 2


def test_a_job_that_takes_too_long_is_ended(tmp_path):
    done = launch(
        "-n", 1, "--timeout", 2, script(tmp_path, "import time; time.sleep(1000)")
    )
    assert done.returncode == 124
    assert (
        "the job did not end within 2 s\nNext step: give it a longer --timeout"
        in done.stderr
    )


ASKS = """\
import sys
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    print("asks", flush=True)
    print("heard", input(), input())
    if "MPICH" in MPI.get_vendor():  # Open MPI's mpiexec passes no end of its input on
        print(sys.stdin.read(), "is the end")
MPI.COMM_WORLD.Barrier()
"""


def test_what_is_typed_at_a_terminal_goes_to_rank_0(tmp_path):
    pid, terminal = pty.fork()
    words = [*commands.MODULE, "launch", "-n", "2", "--timeout", "60"]
    words += [str(script(tmp_path, ASKS))]
    if not pid:
        os.execve(words[0], words, commands.environment())
    said = b""
    try:
        while b"asks" not in said:
            said += os.read(terminal, 4096)
        os.write(terminal, b"two\nlines\n\4")  # and control-D
        while piece := os.read(terminal, 4096):
            said += piece
    except OSError:  # its end
        pass
    finally:
        os.close(terminal)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, said
    assert b"heard two lines" in said
    assert (b"is the end" in said) == (not on_open_mpi()), said


WORKERS = """\
import multiprocessing, os, sys

def double(number):
    return 2 * number

if __name__ == "__main__":
    if not (pid := os.fork()):
        raise SystemExit(0)  # a child that comes to its end is no rank that does
    os.waitpid(pid, 0)
    from mpi4py import MPI  # here: spawned, the pool's process would start MPI a second time
    for method in sys.argv[1:]:
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(double, [1, 2]) == [2, 4]
    MPI.COMM_WORLD.Barrier()
    print("done")
"""


@pytest.mark.parametrize(
    "methods", [("spawn",), pytest.param(("spawn", "forkserver", "fork"), marks=full)]
)
def test_a_ranks_own_processes_find_its_functions_and_say_no_goodbye(tmp_path, methods):
    done = launch("-n", 2, script(tmp_path, WORKERS), *methods)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\ndone\n"


FAILS = """\
import os, sys
how = sys.argv[1]
if how == "import" and (os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) == "1":
    import a_module_that_is_not_there
import chainermn_comm
comm = chainermn_comm.create_communicator("naive")
print("line of", comm.rank)
if how == "raise" and comm.rank == 1:
    raise ValueError("bad \\x1e data")
if how == "exit" and comm.rank == 1:
    sys.exit(3)
if how == "array":  # rank 1 finds the error, rank 0 only hears of it
    comm.allgather_obj(0)
    comm.bcast_obj("x" if comm.rank == 0 else lambda: 0)
    comm.allreduce([0.0] if comm.rank == 0 else "text")
comm.bcast_obj(1)
"""


@pytest.mark.parametrize(
    ("how", "status", "what"),
    [
        pytest.param("raise", 1, "ValueError: bad ", marks=full),
        pytest.param("exit", 3, "sys.exit(3)", marks=full),
        pytest.param(
            "import", 1, "ModuleNotFoundError: No module named 'a_module", marks=full
        ),
        ("array", 1, "TypeError: rank 1: expected an array"),
    ],
)
def test_first_rank_that_failed_is_shown_last(tmp_path, how, status, what):
    done = launch("-n", 2, "--prefix", script(tmp_path, FAILS), how)
    assert done.returncode == status
    end = done.stderr[done.stderr.rindex("chainermn launch: ") :]
    assert end.startswith("chainermn launch: rank 1 on ")
    assert f"failed first: {what}" in end
    assert f"(exit status {status})" in end
    assert done.stderr.count("Traceback (most recent call last)") == (how != "exit")
    assert "runpy" not in done.stderr
    assert "rank.py" not in done.stderr.partition("\n")[2]
    assert end.splitlines()[-1].startswith("Next step: ")
    assert done.stderr.count("Next step: ") == 1
    if how != "import":
        lines = sorted(line for line in done.stdout.splitlines() if "line of" in line)
        assert re.fullmatch(
            r"\[\S*0\].* line of 0 \[\S*1\].* line of 1", " ".join(lines)
        )


DIES = """\
import os, sys
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), 9)
    MPI.Finalize()
    os._exit(0)
if sys.argv[1] == "kill":
    MPI.COMM_WORLD.Barrier()
"""
# MPICH's mpiexec may then kill the other one, and report success all the same. Of two
# that ended by the same signal it names the lower rank, whichever was the first.
LEFT = r"rank 0 on .* failed first: os\._exit\(0\)"
KILLED = "rank 0 on .* failed first: ended by signal 9"


@pytest.mark.parametrize(
    ("how", "status", "what"),
    [("kill", 137, KILLED), pytest.param("finalized", 1, LEFT, marks=full)],
)
def test_a_rank_that_ends_before_its_script_makes_a_bad_job(
    tmp_path, how, status, what
):
    done = launch("-n", 2, script(tmp_path, DIES), how)
    assert done.returncode == status
    assert re.search(what, done.stderr), done.stderr


PRINTS_A_LOG = """\
import os, time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    print(open(LOG).read().replace("PID 1", f"PID {os.getpid()}"), flush=True)
    os.write(2, open(LOG, "rb").read())
time.sleep(6)
MPI.COMM_WORLD.Barrier()
print("done")
"""
LOG = """\
ChainerMN: likely culprit: rank 1 (process 101 on h1) is stopped (SIGSTOP) for 5.0 s.
CHAINERMN_TIMEOUT is set: ending the job.
ChainerMN: nothing was heard of rank 1 on h1 for 20.0 s: the link is cut. Ending the ranks that h0
ChainerMN: rank 1 (process 101 on h1) is gone, last seen in allreduce
ChainerMN: rank 1 of 2: os._exit(3) before MPI was finalized, ending the job.
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 1 RUNNING AT vm
=   EXIT CODE: 9
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
prterun noticed that process rank 1 with PID 1 on node vm exited on signal 9 (Killed).
   Process name: [prterun-vm-21834@1,1]
   Exit code:    5
\x1enothing 0 0 0 1 {"version": 1, "event": "failed", "rank": 0}\x1e
"""


def test_a_script_that_prints_an_old_log_is_no_failure(tmp_path):
    (tmp_path / "log").write_text(LOG)
    text = PRINTS_A_LOG.replace("LOG", repr(str(tmp_path / "log")))
    done = launch("-n", 2, script(tmp_path, text))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done\n") == 2


RESUMES = """\
import os, sys
import chainermn_comm
comm = chainermn_comm.create_communicator("naive")
folder = sys.argv[1]
done = comm.bcast_obj(len(os.listdir(folder)))  # what a checkpoint is to a training
for step in range(done, 6):
    comm.allgather_obj(step)
    if comm.rank == 0:
        open(os.path.join(folder, str(step)), "w").close()
    comm.allgather_obj(step)
    if step in map(int, sys.argv[2:]) and comm.rank == 1:
        raise RuntimeError(f"step {step} failed")
if comm.rank == 0:
    print("went on from", done)
"""


@pytest.mark.parametrize("failing", [(1,), pytest.param((1, 3), marks=full)])
def test_a_job_starts_again_from_its_last_checkpoint(tmp_path, failing):
    steps = tmp_path / "steps"
    steps.mkdir()
    done = launch(
        "-n", 2, "--max-restarts", 2, script(tmp_path, RESUMES), steps, *failing
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"went on from {failing[-1] + 1}\n"
    said = [
        line
        for line in done.stderr.splitlines()
        if line.startswith("chainermn launch: ")
    ]
    words = "chainermn launch: starting again with 2 ranks"
    again = [f"{words}, {n} of 2" for n in range(1, 1 + len(failing))]
    assert [line for line in said if "starting again" in line] == again
    assert "RuntimeError: step 1 failed" in said[1]
    assert len(list(steps.iterdir())) == 6


def test_restarts_come_to_an_end_and_the_users_choice_of_threads_stays(tmp_path):
    text = "import os, sys; print(os.environ.get('OMP_NUM_THREADS')); sys.exit(4)"
    done = launch(
        "-n", 1, "--max-restarts", 1, script(tmp_path, text), MKL_NUM_THREADS="5"
    )
    assert done.returncode == 4
    assert done.stdout == "None\n" * 2


WAITS = """\
import os, pathlib, signal, subprocess, sys, time
from mpi4py import MPI
folder = pathlib.Path(sys.argv[1])
stubborn = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; "
stubborn += "time.sleep(10_000)"
child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
text = f"{os.getpid()} {child.pid}"
(folder / f".{MPI.COMM_WORLD.rank}").write_text(text)
os.rename(folder / f".{MPI.COMM_WORLD.rank}", folder / str(MPI.COMM_WORLD.rank))
if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(10_000)
"""


CHILDLESS = """\
import os, pathlib, signal, sys, time
from mpi4py import MPI
folder = pathlib.Path(sys.argv[1])
(folder / f".{MPI.COMM_WORLD.rank}").write_text(f"{os.getpid()}")
os.rename(folder / f".{MPI.COMM_WORLD.rank}", folder / str(MPI.COMM_WORLD.rank))
"""


@pytest.mark.parametrize(
    ("number", "arguments"),
    tiered(
        [(signal.SIGINT, ("stubborn",))],
        (signal.SIGINT, signal.SIGTERM),
        ((), ("stubborn",)),
    ),
)
def test_ctrl_c_ends_everything(tmp_path, number, arguments):
    code, said, started = signalled(tmp_path, number, *arguments)
    assert code == 128 + number
    how = "Ctrl-C" if number == signal.SIGINT else "signal 15 (SIGTERM)"
    assert f"chainermn launch: ended by {how}\nNext step: " in said
    assert "is gone" not in said
    assert verdict_on(said).how == f"ended by {how}"
    assert "starting again" not in said
    assert len(started) == 4
    assert all(map(is_gone, started)), "a process outlived the launch"


@pytest.mark.parametrize("handles", [False, True])
def test_a_warning_reaches_a_script_as_the_signal_that_came(tmp_path, handles):
    """It ends one that doesn't handle it, at once; and one that does ends as it wishes."""
    own = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('as I wish'))\n"
        if handles
        else ""
    )
    text = CHILDLESS + own + "time.sleep(10_000)\n"
    code, said, started = signalled(tmp_path, signal.SIGTERM, text=text, seconds=15)
    assert code == 128 + signal.SIGTERM
    assert ("as I wish" in said) == handles
    assert all(map(is_gone, started))


def test_a_job_that_ends_well_after_a_warning_has_succeeded(tmp_path):
    text = CHILDLESS + (
        "goes_on = True\n"
        "signal.signal(signal.SIGTERM, lambda *_: globals().update(goes_on=False))\n"
        "while goes_on:\n    time.sleep(0.01)\n"
    )
    code, said, _ = signalled(tmp_path, signal.SIGTERM, text=text)
    assert code == 0, said


def test_a_kill_ends_the_ranks_too(tmp_path):
    """Nothing can be done by then but what was prepared: mpiexec hears of it and ends them."""
    code, _, started = signalled(tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL
    for child in started[1::2]:  # of ranks; nobody is left to look for them
        os.kill(child, signal.SIGKILL)
    assert all(map(is_gone, started)), "a process outlived the launch"


def signalled(
    folder: Path,
    number: int,
    *arguments: str,
    text: str = WAITS,
    seconds: float = commands.SECONDS,
) -> tuple[int, str, list[int]]:
    """Signal a launch whose ranks run: its end, what it said, and each rank's process and child."""
    pids = folder / "pids"
    pids.mkdir()
    process = commands.start(
        *(
            "launch",
            "-n",
            2,
            "--max-restarts",
            5,
            script(folder, text),
            pids,
            *arguments,
        ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        assert soon(
            lambda: process.poll() is not None or {"0", "1"} <= set(os.listdir(pids))
        )
        assert process.poll() is None
        started = [
            int(pid) for one in pids.iterdir() for pid in one.read_text().split()
        ]
        process.send_signal(number)
        said = process.communicate(timeout=seconds)[1]
    finally:
        process.kill()
        process.wait()
    return process.returncode, said, started


STANDS_IN = f"""#!{sys.executable}
import json, os, subprocess, sys, time
if "--version" in sys.argv:
    print("HYDRA build details: Version: 4.2.0")
    sys.exit()
words = sys.argv[sys.argv.index("-n") + 2:]
def start(rank):
    return subprocess.Popen(words, env={{**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)}})
"""


def launch_by(
    mpiexec: str, folder: Path, text: str, *arguments: object
) -> commands.Done:
    """Launch a script of this text by a stand-in for mpiexec, which ends so."""
    path = commands.with_program(folder, "mpiexec", STANDS_IN + mpiexec)
    return launch(*arguments, script(folder, text), PATH=path)


def test_an_mpiexec_of_another_mpi_is_noticed(tmp_path):
    mpiexec = (
        "started = start(0), start(1)\nsys.exit(max(one.wait() for one in started))\n"
    )
    text = "from mpi4py import MPI\n"
    done = launch_by(mpiexec, tmp_path, text, "-n", 2, "--max-restarts", 3)
    assert done.returncode == 1
    assert "is alone in its MPI" in done.stderr
    assert "starting again" not in done.stderr


def test_a_start_at_which_no_rank_begins_is_one_of_the_restarts(tmp_path):
    (tmp_path / "count").write_text("0")
    mpiexec = (
        f"path = {str(tmp_path / 'count')!r}\n"
        "number = int(open(path).read()) + 1\n"
        "open(path, 'w').write(str(number))\n"
        "sys.exit(1 if number == 2 else start(0).wait())\n"
    )
    text = "import os, sys; sys.exit(3 * (int(os.environ['CHAINERMN_RESTARTS']) < 2))"
    done = launch_by(mpiexec, tmp_path, text, "-n", 1, "--max-restarts", 3)
    assert done.returncode == 0, done
    assert "starting again with 1 ranks, 2 of 3" in done.stderr


def test_hosts_reach_mpiexec_as_one_word_with_their_ranks(tmp_path):
    """What a stand-in for mpiexec is given; real hosts are in tests/cluster."""
    hostfile = tmp_path / "my hosts"
    hostfile.write_text("node0 slots=2\nnode1:2\n")
    done = launch_by(
        "print(json.dumps(sys.argv[1:]))", tmp_path, "", "--hostfile", hostfile
    )
    assert json.loads(done.stdout)[:4] == ["-hosts", "node0:2,node1:2", "-n", "4"]
    assert done.returncode == 2
    assert "no rank started" in done.stderr


def test_a_step_within_a_step_of_slurm_shares_its_cores(tmp_path):
    path = commands.with_program(tmp_path, "mpiexec", STANDS_IN + "start(0).wait()")
    text = "import os; print(os.environ.get('SLURM_OVERLAP'), os.environ.get('SLURM_OVERCOMMIT'))"
    name = script(tmp_path, text)
    assert launch("-n", 1, name, PATH=path).stdout == "None None\n"
    assert launch("-n", 1, name, PATH=path, SLURM_STEP_ID="0").stdout == "1 1\n"


SLURM = {
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_NTASKS": "3",
}


@pytest.mark.parametrize(
    ("arguments", "shares"),
    [
        ((), "node0:2,node1:1"),
        (("-n", 2), "node0:2"),
        (("-n", 6), "node0:3,node1:3"),  # more than Slurm planned
        (("--hosts", "a,b"), "a:1,b:1"),
    ],
)
def test_a_schedulers_job_gives_hosts_and_ranks(tmp_path, arguments, shares):
    """What a stand-in for mpiexec is given; tests/slurm has a real one."""
    mpiexec = tmp_path / "my mpiexec"
    commands.program(mpiexec, STANDS_IN + "print(json.dumps(sys.argv[1:]))")
    names = "#!/bin/sh\nprintf 'node0\\nnode1\\n'\n"
    path = commands.with_program(tmp_path, "scontrol", names)
    words = ("--mpiexec", mpiexec, *arguments, script(tmp_path, ""))
    done = launch(*words, **SLURM, PATH=path)
    assert json.loads(done.stdout)[:2] == ["-hosts", shares]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("SCRIPT",), "give -n, --hosts or --hostfile"),
        (("-n", "0", "SCRIPT"), "0 must be a whole number, 1 or more"),
        (("-n", "2", "no such script.py"), "there is no no such script.py in /"),
        (("--hosts", "a;b", "SCRIPT"), "'a;b' in --hosts"),
        (("--hosts", "a", "--hostfile", "f", "SCRIPT"), "exclude each other"),
        (("--hostfile", "no such file", "SCRIPT"), "'no such file' can't be read"),
        (("-n", "3", "--hosts", "a:1,b:1", "SCRIPT"), "3 ranks don't fit"),
        (("--nonsense", "-n", "1", "SCRIPT"), "nonsense"),
        (("-n", "2"), "Missing argument 'SCRIPT'"),
        (("-n", "1", "SCRIPT"), "no mpiexec on PATH"),
        (("-n", "1", "--mpiexec", "/no/mpiexec", "SCRIPT"), "there is no /no/mpiexec"),
        (("-n", "1", "--env", "A B=3", "SCRIPT"), "--env A B=3: write NAME=VALUE"),
        (("-n", "1", "--env", "SET", "SCRIPT"), "--env SET: write NAME=VALUE"),
        (("-n", "2", "/bin/ls"), "to run a program: mpiexec -n 2 /bin/ls"),
        (("-n", "1", "--timeout", "nan", "SCRIPT"), "nan must be a number of seconds"),
        (("-n", "1", "--log-dir", "SCRIPT", "SCRIPT"), "'--log-dir'"),
    ],
)
def test_what_cannot_be_started_is_a_usage_error(tmp_path, arguments, text):
    name = script(tmp_path, "")
    words = [name if word == "SCRIPT" else word for word in arguments]
    done = commands.invoke("launch", *words, COLUMNS="200", PATH=str(tmp_path))
    assert done.exit_code == 2
    assert text in " ".join(done.output.split())


def test_a_rank_starts_no_job(tmp_path):
    done = commands.invoke("launch", "-n", 2, script(tmp_path, ""), PMI_RANK="0")
    assert done.exit_code == 2
    assert "run it without mpiexec" in " ".join(done.output.split())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_ranks_own_exit_status_is_not_that_of_ranks_that_all_leave(tmp_path, ranks):
    done = launch("-n", ranks, script(tmp_path, "import sys; sys.exit(75)"))
    assert done.returncode == 1
    assert "failed first: sys.exit(75)" in done.stderr
