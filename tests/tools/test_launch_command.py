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
import time
from pathlib import Path

import pytest

from tests.support.jobs import commands
from tests.support.jobs.processes import is_gone, soon
from tests.support.jobs.runner import on_open_mpi
from tests.support.jobs.scripts import ROOT
from tests.support.tools.jobs import verdict_on

full = pytest.mark.full
STAGES = str(ROOT / "scripts" / "stages")  # a script of bash's


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
mine = (sys.argv, __file__, int(os.environ["OMP_NUM_THREADS"]) > 0, __name__, beside.VALUE)
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
    rank = [[str(name), *arguments], str(name), True, "__main__", 7]
    assert json.loads(done.stdout) == [rank, rank]
    assert not list(tmp_path.rglob("trap"))
    # The line that is printed can be pasted, and does the same.
    pasted = done.stderr.removeprefix("chainermn launch: ")
    again = commands.run("env", *shlex.split(pasted))
    assert again.stdout == done.stdout, again.stderr


def test_variables_reach_the_ranks_and_each_ranks_output_its_file(tmp_path):
    text = "import os, sys; print(os.environ['OWN']); sys.exit('end')"
    options = ("--env", "OWN=a, b", "--log-dir", tmp_path / "logs", "--max-restarts", 1)
    done = launch("-n", 2, *options, script(tmp_path, text))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "failed first: sys.exit('end') (exit status 1)" in done.stderr
    for rank in (0, 1):
        written = (tmp_path / f"logs/rank-{rank}.log").read_text()
        assert written == "a, b\nend\n" * 2


def test_what_happened_is_one_object_and_output_stays_out_of_it(tmp_path):
    text = "import os, sys; print(os.environ.get('OMP_NUM_THREADS')); sys.exit(3)"
    name = script(tmp_path, text)
    done = launch("-n", 1, "--json", "--max-restarts", 1, name, MKL_NUM_THREADS="5")
    found = json.loads(done.stdout)
    assert found.pop("command")[-1] == str(name)
    how = "failed first: sys.exit(3) (exit status 3)"
    assert found == {
        "success": False,
        "status": 3,
        "cause": f"rank 0 on {socket.gethostname()} {how}",
        "next_step": "read what that rank printed before.",
        "rank": 0,
        "restartable": True,
        "restarts": 1,
        "traceback": "",
        "hosts": {},
    }
    assert done.returncode == 3
    assert done.stderr.endswith(f"{found['cause']}\nNext step: {found['next_step']}\n")
    # The user's choice of threads stays.
    assert done.stderr.count("None\n") == 2


def test_a_job_that_takes_too_long_is_ended(tmp_path):
    name = script(tmp_path, "import time; time.sleep(1000)")
    done = launch("-n", 1, "--timeout", 1, name)
    assert done.returncode == 124
    verdict = verdict_on(done.stderr)
    assert verdict.how == "the job did not end within 1 s"
    assert verdict.next_step.startswith("Next step: run it again with --env CHAINERMN_")


def test_a_failure_that_is_known_is_not_replaced_by_the_time_limit(tmp_path):
    text = (
        "import os, time\n"
        "if '0' in (os.getenv('PMI_RANK'), os.getenv('OMPI_COMM_WORLD_RANK')):\n"
        "    raise ValueError\n"
        "time.sleep(1000)\n"
    )
    done = launch("-n", 2, "--timeout", 3, script(tmp_path, text))
    assert done.returncode == 1
    assert "rank 0" in done.stderr.splitlines()[-2]


@pytest.mark.full
def test_the_time_limit_holds_while_a_pager_reads_nothing(tmp_path):
    text = "import os\nprint(os.getpid())\nwhile True: print('x' * 9999)"
    words = ("launch", "-n", 1, "--timeout", 5, script(tmp_path, text))
    with commands.start(*words, stdout=subprocess.PIPE) as process:
        assert is_gone(int(process.stdout.readline()))
        process.stdout.read()
    assert process.returncode == 124


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


def at_terminal(*words: str, typed: bytes = b"") -> tuple[int, bytes]:
    """Run this at a terminal, and type when it asks; its exit status, and what it said."""
    pid, terminal = pty.fork()
    if not pid:
        os.execve(words[0], words, commands.environment())
    said = b""
    try:
        while piece := os.read(terminal, 4096):
            said += piece
            if b"asks" in piece:
                os.write(terminal, typed)
    except OSError:  # its end
        pass
    finally:
        os.close(terminal)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, said


def test_what_is_typed_at_a_terminal_goes_to_rank_0(tmp_path):
    words = ("launch", "-n", "2", "--timeout", "60", str(script(tmp_path, ASKS)))
    control_d = b"\4"
    status, said = at_terminal(
        *commands.MODULE, *words, typed=b"two\nlines\n" + control_d
    )
    assert status == 0, said
    assert b"heard two lines" in said
    assert (b"is the end" in said) == (not on_open_mpi()), said


BEHIND = """\
import subprocess, sys
with subprocess.Popen(sys.argv[1:], process_group=0) as process:
    sys.exit(process.wait(100))
"""


def test_a_job_in_the_background_of_a_terminal_runs_to_its_end(tmp_path):
    """Reading the terminal would stop it."""
    words = ("launch", "-n", "2", str(script(tmp_path, "print('runs')")))
    status, said = at_terminal(sys.executable, "-c", BEHIND, *commands.MODULE, *words)
    assert status == 0, said
    assert said.count(b"runs") == 2


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


def test_a_ranks_own_processes_find_its_functions_and_say_no_goodbye(tmp_path):
    done = launch("-n", 2, script(tmp_path, WORKERS), "spawn", "forkserver", "fork")
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
    assert end.splitlines()[-1].startswith("Next step: ")
    assert done.stderr.count("Next step: ") == 1
    if how != "import":
        lines = " ".join(sorted(done.stdout.splitlines()))
        assert re.fullmatch(r"\[\S*0\].* line of 0 \[\S*1\].* line of 1", lines)


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
    if step == 1 and comm.rank == 1:
        raise RuntimeError(f"step {step} failed")
if comm.rank == 0:
    print("went on from", done)
"""


def test_a_job_starts_again_from_its_last_checkpoint(tmp_path):
    steps = tmp_path / "steps"
    steps.mkdir()
    done = launch("-n", 2, "--max-restarts", 2, script(tmp_path, RESUMES), steps)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "went on from 2\n"
    failed, again = re.findall("^chainermn launch: ([rs].*)", done.stderr, re.M)
    assert "RuntimeError: step 1 failed" in failed
    assert again == "restart 1 of 2, with 2 ranks"
    assert len(list(steps.iterdir())) == 6


WAITS = """\
import os, pathlib, signal, subprocess, sys, time
from mpi4py import MPI
pids = [os.getpid()]
exec(sys.argv[2])
path = pathlib.Path(sys.argv[1], str(MPI.COMM_WORLD.rank))
path.write_text(" ".join(map(str, pids)))
path.rename(f"{path}.pids")
time.sleep(10_000)
"""
CHILD = """\
stubborn = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; "
stubborn += "time.sleep(10_000)"
child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
pids.append(child.pid)
"""
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
EXITS = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit({})))\n"


def signalled(folder, number, text, *options):
    """Signal a launch whose ranks have run this text: its end, what it said, their processes."""
    process = commands.start(
        *("launch", "-n", 2, *options, script(folder, WAITS), folder, text),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )

    def files():
        return list(folder.glob("*.pids"))

    try:
        assert soon(lambda: process.poll() is not None or len(files()) == 2)
        assert process.poll() is None
        started = " ".join(file.read_text() for file in files())
        process.send_signal(number)
        if "exit" in text:  # later, and a scheduler may send another warning meanwhile
            time.sleep(0.2)
            process.send_signal(signal.SIGUSR1)
        said = process.communicate(timeout=commands.SECONDS)[1]
    finally:
        process.kill()
        process.wait()
    return process.returncode, said, [int(pid) for pid in started.split()]


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGINT, "ended by Ctrl-C"),
        pytest.param(signal.SIGTERM, "ended by signal 15 (SIGTERM)", marks=full),
    ],
)
def test_ctrl_c_ends_everything(tmp_path, number, how):
    options = ("--max-restarts", 5, "--grace", 3)
    code, said, started = signalled(tmp_path, number, CHILD + IGNORES, *options)
    assert code == 128 + number
    assert f"chainermn launch: {how}\nNext step: " in said
    assert "is gone" not in said
    assert verdict_on(said).how == how
    assert "restart 1" not in said
    assert len(started) == 4
    assert all(map(is_gone, started)), "a process outlived the launch"


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("", 143, "ended by signal 15 (SIGTERM)"),
        (EXITS.format("'as I wish'"), 143, "as I wish"),
        (EXITS.format(0), 0, ""),
    ],
)
def test_a_warning_reaches_a_script_as_the_signal_that_came(
    tmp_path, text, status, words
):
    """It ends a script that doesn't handle it, at once; one that does ends as it wishes."""
    code, said, started = signalled(tmp_path, signal.SIGTERM, text, "--grace", 600)
    assert code == status
    assert words in said
    assert all(map(is_gone, started))


def test_a_kill_ends_the_ranks_too(tmp_path):
    """Nothing can be done by then but what was prepared: mpiexec hears of it and ends them."""
    code, _, started = signalled(tmp_path, signal.SIGKILL, CHILD)
    assert code == -signal.SIGKILL
    for child in started[1::2]:  # of ranks; nobody is left to look for them
        os.kill(child, signal.SIGKILL)
    assert all(map(is_gone, started)), "a process outlived the launch"


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
    assert "use the mpiexec of mpi4py's MPI" in verdict_on(done.stderr).next_step
    assert "restart 1" not in done.stderr


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
    assert "restart 2 of 3, with 1 rank\n" in done.stderr


def planned(folder: Path, *arguments: object, **variables: str) -> str:
    """The command line that a dry run prints; real hosts are in tests/cluster and tests/slurm."""
    path = commands.with_program(folder, "mpiexec", "#!/bin/sh\necho HYDRA 4.2.0\n")
    commands.with_program(folder, "scontrol", "#!/bin/sh\nprintf 'node0\\nnode1\\n'\n")
    words = ("launch", "--dry-run", *arguments, "-m", "package.train", "x")
    done = commands.invoke(*words, PATH=path, **variables)
    assert done.exit_code == 0, done.output
    return done.stderr


def test_a_dry_run_only_prints_the_command_line(tmp_path):
    hostfile = tmp_path / "my hosts"
    hostfile.write_text("node0 slots=2\nnode1:2\n")
    logs = tmp_path / "logs"
    said = planned(tmp_path, "--hostfile", hostfile, "--log-dir", logs)
    assert "/bin/mpiexec -hosts node0:2,node1:2 -n 4 " in said
    assert said.endswith(" -m chainermn_tools.rank -m package.train x\n")
    assert not logs.exists()


def test_a_step_within_a_step_of_slurm_shares_its_cores(tmp_path):
    said = planned(tmp_path, "--hosts", "a", "--env", "OWN=a b", SLURM_STEP_ID="0")
    assert "SLURM_OVERLAP=1 SLURM_OVERCOMMIT=1 OWN='a b' " in said


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
    assert f" -hosts {shares} -n " in planned(tmp_path, *arguments, **SLURM)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("SCRIPT",), "give -n, --hosts or --hostfile"),
        (("no such script.py",), "there is no 'no such script.py' in /"),
        (("--hosts", "a;b", "SCRIPT"), "'a;b' in --hosts"),
        (("--hosts", "a", "--hostfile", "f", "SCRIPT"), "exclude each other"),
        (("--hostfile", "no such file", "SCRIPT"), "'no such file' can't be read"),
        (("-n", "3", "--hosts", "a:1,b:1", "SCRIPT"), "3 ranks don't fit"),
        (("-n", "1", "SCRIPT"), "no mpiexec on PATH"),
        (("-n", "1", "--mpiexec", "/no/mpiexec", "SCRIPT"), "there is no /no/mpiexec"),
        (("-n", "1", "--env", "A B=3", "SCRIPT"), "--env A B=3: write NAME=VALUE"),
        (("-n", "2", "python3", "SCRIPT"), "give only the script"),
        (("-n", "2", "/bin"), "the folder /bin has no __main__.py"),
        (("/bin/ls",), "to run a program: mpiexec -n N /bin/ls"),
        (("-n", "2", STAGES), f"to run a program: mpiexec -n 2 {STAGES}"),
        (("--hosts", "a", "--min-ranks", "1", "SCRIPT"), "needs --max-restarts"),
        (("-n", "1", "--log-dir", "SCRIPT", "SCRIPT"), "'--log-dir'"),
        (("-n", "1", "--log-dir", "/proc/x", "SCRIPT"), "/proc/x: No such file"),
    ],
)
def test_what_cannot_be_started_is_a_usage_error(tmp_path, arguments, text):
    name = script(tmp_path, "")
    words = [name if word == "SCRIPT" else word for word in arguments]
    done = commands.invoke("launch", *words, COLUMNS="200", PATH=str(tmp_path))
    assert done.exit_code == 2
    assert text in " ".join(done.output.split())


def test_a_rank_starts_no_job_but_a_shell_of_srun_does(tmp_path):
    alone = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    for words in (["doctor"], ["launch", "-n", 2, script(tmp_path, "")]):
        done = commands.invoke(*words, **alone)
        assert done.exit_code == 2
        assert "run it without mpiexec" in " ".join(done.output.split())
    assert planned(tmp_path, "-n", 1, SLURM_PTY_PORT="1", **alone)
