"""`chainermn doctor` as a user runs it: where all is well, hangs, signals, terminals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.jobs import commands
from tests.support.jobs.processes import is_gone, soon
from tests.support.tools.doctor import (
    COMMUNICATORS,
    STAGES,
    failed,
    skipped,
    warning,
)

MANUAL = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
# Ends a test that hangs; the doctor ends by itself, and in less unless it hangs.
LIMIT_SECONDS = 200
HANGS = "#!/bin/sh\nsleep 1000 & echo $! >> {0}; echo $$ >> {0}; wait\n"


def report(*arguments: object, **how: object) -> dict:
    """What --json prints; findings by name, and those that are not well as `bad`."""
    process = commands.start(
        "doctor", "--json", *arguments, stdout=subprocess.PIPE, **how
    )
    found = json.loads(process.communicate(timeout=LIMIT_SECONDS)[0])
    assert process.returncode == {"ok": 0, "failed": 1, "warning": 3}[found["status"]]
    found["by_name"] = {one["name"]: one for one in found["findings"]}
    found["bad"] = [one["name"] for one in found["findings"] if one["fix"]]
    return found


@pytest.mark.ci
def test_all_is_well_where_nothing_is_wrong():
    """With this machine as the only host, where no sshd need run.

    What is on standard input is left to others, as in a shell's `while read host; do
    chainermn doctor ...; done < hosts`.
    """
    env = commands.environment(HYDRA_LAUNCHER_EXEC="/nowhere", OMP_NUM_THREADS="1")
    options = ("--hosts", "localhost:2", "--script", __file__)
    ours, theirs = os.pipe()
    os.write(theirs, b"host\n")  # and it stays open
    with open(ours, "rb", buffering=0) as stdin, open(theirs, "wb"):
        found = report("--timeout", LIMIT_SECONDS, *options, stdin=stdin, env=env)
        assert stdin.read(100) == b"host\n"
    assert found["bad"] == []
    tables = MANUAL.read_text().split("## JSON")[1].split("A finding:")
    keys, own = (set(re.findall(r"^\| `(\w+)` \|", one, re.M)) for one in tables)
    assert set(found) - {"by_name", "bad"} == keys
    assert (found["schema"], found["well"], found["status"]) == (4, True, "ok")
    hosts = [{"name": "localhost", "slots": 2}]
    assert found["asked"] == {"ranks": None, "hosts": hosts, "script": __file__}
    names = [name for stage in STAGES.values() for name in stage]
    assert list(found["by_name"]) == names
    for one in found["findings"]:
        assert set(one) == own
        assert one["name"] in STAGES[one["layer"]]
        assert one["found"]
    assert found["by_name"]["ssh"]["found"] == "no host needs a login"
    tried = {*COMMUNICATORS} - {"pure_nccl"}
    for name in ("communicators", "hosts_communicators"):
        assert tried <= set(found["by_name"][name]["details"]["tried"])


# Put in the ranks' way: at a communicator, rank 1 crashes.
FAULT = """
import os
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    import chainermn_comm
    real = chainermn_comm.create_communicator
    def create_communicator(name, *more, **options):
        if name == "two_dimensional":
            os.kill(os.getpid(), 11)
        return real(name, *more, **options)
    chainermn_comm.create_communicator = create_communicator
"""


@pytest.mark.full
def test_a_communicator_in_which_a_rank_crashes_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    found = report("--timeout", 90, env=commands.environment(PYTHONPATH=path))
    assert found["bad"] == ["communicators"]
    said = "two_dimensional: 0 of 2 ranks finished; mpiexec ended"
    assert said in found["by_name"]["communicators"]["found"]
    assert found["by_name"]["ranks_end"]["because"] == "communicators"


@pytest.mark.ci
def test_an_mpiexec_that_hangs_is_named_alone_and_ended_with_its_children(tmp_path):
    # The shell's child holds the output open, so ending the shell alone would not do.
    pids = tmp_path / "pids"
    path = commands.with_program(tmp_path, "mpiexec", HANGS.format(pids))
    # Of which mpiexec gets ten; others need one or two, and more on busy cores.
    found = report("--timeout", 40, env=commands.environment(PATH=path))
    assert found["bad"] == ["mpiexec"]
    assert "did not end within 10." in found["by_name"]["mpiexec"]["found"]
    assert "--timeout" in found["by_name"]["mpiexec"]["fix"]
    assert len(pids.read_text().split()) == 2
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


@pytest.mark.parametrize(
    ("number", "program"),
    [
        (signal.SIGINT, "mpiexec"),
        pytest.param(signal.SIGINT, "ssh", marks=pytest.mark.ci),
        pytest.param(signal.SIGTERM, "mpiexec", marks=pytest.mark.full),
    ],
)
def test_a_signal_ends_all_that_was_started(tmp_path, number, program):
    pids = tmp_path / "pids"
    path = commands.with_program(tmp_path, program, HANGS.format(pids))
    how = {"stdout": subprocess.PIPE, "env": commands.environment(PATH=path)}
    words = "--json --hosts some-host:1 --timeout 3600"
    process = commands.start("doctor", *words.split(), **how)
    assert soon(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, out) == (128 + number, "")
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


# The command line, in this process; each check finds all well, or what is planted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--hosts a --hostfile b", "exclude each other"),
        ("--json --report", "--json and --report exclude each other"),
        ("--hosts a;reboot", "is no host"),
        ("--hostfile /nonexistent/hosts", "can't be read"),
        ("--script x.py", "--hosts"),
        ("-n 0", "0"),
    ],
)
def test_wrong_command_lines_are_refused(machine, arguments, said):
    done = machine.command(*arguments.split())
    assert done.exit_code == 2
    assert said in done.output


def test_the_hosts_of_a_file_are_reported_with_what_was_asked_for(machine, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a:2\nb slots=3\n")
    script = f"{tmp_path}/x.py"
    named = ("-n", 5, "--hostfile", hostfile, "--script", script)
    hosts = [{"name": "a", "slots": 2}, {"name": "b", "slots": 3}]
    asked = json.loads(machine.command("--json", *named).output)["asked"]
    assert asked == {"ranks": 5, "hosts": hosts, "script": script}


FIX = "export A=1   # and more"


def test_text_has_a_line_for_each_check_and_ends_with_a_verdict(machine):
    done = machine.command(
        import_chainermn=warning("so so", FIX),
        mpiexec=failed("it is bad", FIX),
        mpi_match=skipped("'mpiexec' failed", "mpiexec"),
        scheduler=skipped("no Slurm"),
        nccl=skipped("no GPU"),
        gpu_communicators=skipped("no GPU"),
    )
    assert done.exit_code == 1
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert lines[:2] == ["This machine", "ok python it is"]
    bad = lines.index("FAILED mpiexec it is bad")
    assert lines[bad + 1] == "fix: export A=1 # and more"
    assert "skipped (mpiexec failed): mpi_match" in lines
    assert "skipped (nothing to check): scheduler, nccl" in lines
    assert lines[-1] == (
        "1 check failed: mpiexec. 1 warning: import_chainermn. "
        "Not checked: GPUs, other hosts."
    )


def test_hosts_are_checked_where_they_were_asked_for(machine):
    bad = warning("so so", FIX)
    assert machine.command(slots=bad).exit_code == 0
    assert machine.command("--hosts", "a", slots=bad).exit_code == 3
    assert machine.command("--hosts", "a").output.endswith("\nAll is well.\n")


def test_terminals_get_colours_and_fixes_that_can_be_copied(machine):
    machine.plant(FORCE_COLOR="1", COLUMNS="60", TERM="xterm")
    fix = "long " * 30 + "fix"
    printed = machine.command(mpiexec=failed("it is bad and " * 12, fix)).output
    assert "\x1b[1;31m" in printed
    assert f"fix: {fix}" in re.sub(r"\x1b\[[0-9;]*m", "", printed)


def test_a_report_holds_findings_and_facts(machine):
    done = machine.command("--report", mpiexec=failed("it fails", "fix it"))
    assert done.exit_code == 1
    assert done.output.startswith(
        "<details><summary>chainermn doctor: 1 check failed: mpiexec. Not checked: GPUs"
    )
    assert done.output.rstrip().endswith("</details>")
    assert "\npackages\n" in done.output, "what chainermn env prints"


def test_the_manual_lists_every_check_once():
    part = MANUAL.read_text().split("## The checks")[1].split("## JSON")[0]
    cells = re.findall(r"^\| (`.+?`) \|", part, re.MULTILINE)
    listed = re.findall(r"`(\w+)`", " ".join(cells))
    assert listed == [name for names in STAGES.values() for name in names]
