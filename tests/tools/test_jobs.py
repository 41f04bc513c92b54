"""Programs that are run to their end or to a limit, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil

from chainermn_tools import jobs
from tests.support.jobs import commands
from tests.support.jobs.processes import is_gone, soon

# Ends a test that hangs; nothing here takes so long.
LIMIT_SECONDS = 60
LONG = 3600.0


def test_a_program_says_how_it_ended_and_no_shell_reads_its_words():
    code = (
        "import sys; print(sys.argv[1], sys.stdin.read(), flush=True); sys.exit('so')"
    )
    words = [sys.executable, "-c", code, "; echo $HOME 'x'"]
    done = jobs.run(words, LIMIT_SECONDS)
    assert (done.returncode, done.stdout) == (1, "; echo $HOME 'x' \nso\n")


def test_a_program_that_ignores_its_end_is_ended_with_all_that_it_started(
    tmp_path, monkeypatch
):
    """Of other folders of Open MPI's mpiexec none is removed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = f"""
trap '' TERM
mkdir -p {tmp_path}/ompi.$$/0 {tmp_path}/ompi.other
env -i setsid sh -c 'trap "" TERM; echo $$ >> {tmp_path}/pids; sleep {LONG}' &
echo $$ >> {tmp_path}/pids
sleep {LONG}
"""
    bystander = subprocess.Popen(["sleep", str(LONG)], start_new_session=True)
    try:
        assert jobs.run(["sh", "-c", script], 3).returncode is None
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert all(is_gone(int(pid)) for pid in pids)
    assert [path.name for path in tmp_path.glob("ompi.*")] == ["ompi.other"]


def test_orphans_that_end_do_not_stay_as_zombies(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.children, "REAP_SECONDS", 0.2)
    orphans = "for each in `seq 20`; do (setsid sleep 0.1 &) done"
    script = f"{orphans}; touch {tmp_path}/begun; exec sleep {LONG}"
    before = len(psutil.Process().children())
    with jobs.running(["sh", "-c", script]):
        assert soon((tmp_path / "begun").exists)
        assert soon(lambda: len(psutil.Process().children()) == before + 1)


def test_a_process_that_cannot_be_killed_is_left_behind(monkeypatch):
    monkeypatch.setattr(jobs.children, "KILL_SECONDS", 0.1)
    started = []
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "kill", lambda it: started.append(it.pid))
        script = f"trap '' TERM; exec sleep {LONG}"
        assert jobs.run(["sh", "-c", script], 1).returncode is None
    os.kill(started[0], signal.SIGKILL)
    os.waitpid(started[0], 0)


def test_at_the_end_no_program_is_left_and_none_is_started(tmp_path):
    outcomes = []

    def work():
        # Both threads kill these.
        orphans = f"for each in `seq 50`; do setsid sleep {LONG} & done"
        script = f"{orphans}; touch {tmp_path}/begun; sleep {LONG}"
        outcomes.append(jobs.run(["sh", "-c", script], LONG).returncode)
        try:
            jobs.run(["true"], LONG)
        except OSError as problem:
            outcomes.append(problem.strerror)

    thread = threading.Thread(target=work, daemon=True)
    with jobs.kill_children_on_exit():
        thread.start()
        assert soon((tmp_path / "begun").exists)
    thread.join(LIMIT_SECONDS)
    assert outcomes == [-9, "no program is started any more"]
    with jobs.kill_children_on_exit():
        assert jobs.run(["true"], LIMIT_SECONDS).returncode == 0


def test_a_failure_is_quoted_on_one_line():
    assert jobs.quote_output("") == ""
    assert jobs.quote_output("-----\nno\n  luck\n-----") == ": no luck"
    quoted = jobs.quote_output(f"first {'x' * 500} last")
    assert quoted == f": first {'x' * 194} ... {'x' * 195} last"


def test_programs_that_threads_run_do_not_end_one_another():
    with ThreadPoolExecutor(100) as pool:
        ended = [pool.submit(jobs.run, ["true"], LIMIT_SECONDS) for _ in range(100)]
    assert {one.result().returncode for one in ended} == {0}


def test_names_and_addresses_of_this_machine_are_known(tmp_path, monkeypatch):
    """A name server that is down holds nobody up."""
    slow = commands.with_program(tmp_path, "getent", "#!/bin/sh\nsleep 1000\n")
    with jobs.kill_children_on_exit():
        assert jobs.is_here(f"{socket.gethostname()}.example.org")
        assert jobs.is_here("127.0.0.1")
        assert not jobs.is_here("192.0.2.1")
        monkeypatch.setenv("PATH", slow)
        monkeypatch.setattr(jobs.hosts, "LOOKUP_SECONDS", 0.1)
        assert not jobs.is_here("slow.example.org")


def test_a_job_ends_though_a_rank_has_left_a_process(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.job, "FINISHED_SECONDS", 1.0)
    script = tmp_path / "script.py"
    script.write_text(f"import subprocess; subprocess.Popen(['sleep', '{LONG}'])")
    path = commands.environment()["PATH"]
    done = commands.invoke("launch", "-n", 2, script, PATH=path)
    assert done.exit_code == 0, done.output
