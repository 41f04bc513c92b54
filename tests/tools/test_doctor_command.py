"""`chainermn doctor` as a user runs it: where all is well, planted faults, hangs, terminals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.jobs import commands
from tests.support.jobs.processes import is_gone, soon
from tests.support.jobs.runner import MPIEXEC
from tests.support.tools import doctor as of_doctor
from tests.support.tools.doctor import STAGES, Machine, failed, ok, skipped, warning

MANUAL = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
# Ends a test that hangs; the doctor ends by itself, and in less unless it hangs.
LIMIT_SECONDS = 200
# What one that hangs is given. It includes starting Python, on a machine that is busy
# otherwise.
LONG_SECONDS = 90


def report(*arguments: object, **variables: str) -> dict:
    """What --json prints; findings by name, and those that are not well as `bad`."""
    ended = commands.chainermn("doctor", "--json", *arguments, **variables)
    found = json.loads(ended.stdout)
    status = {"ok": 0, "failed": 1, "warning": 3}[found["status"]]
    assert ended.returncode == status, ended.stderr
    found["by_name"] = {one["name"]: one for one in found["findings"]}
    found["bad"] = [one["name"] for one in found["findings"] if one["fix"]]
    return found


@pytest.mark.ci
def test_all_is_well_where_nothing_is_wrong():
    found = report("--timeout", LIMIT_SECONDS)
    assert found["bad"] == []
    assert set(found) - {"by_name", "bad"} == documented_keys("## JSON", "A finding:")
    assert (found["schema"], found["well"], found["status"]) == (3, True, "ok")
    assert found["asked"] == {
        "ranks": None,
        "hosts": [],
        "hostfile": None,
        "script": None,
    }
    assert found["seconds"] > 0
    assert [one["name"] for one in found["findings"]] == [
        *STAGES["here"],
        *STAGES["live"],
    ]
    for one in found["findings"]:
        assert set(one) == documented_keys("A finding:", "## The checks")
        assert one["name"] in STAGES[one["layer"]]
        assert one["found"]
        assert one["fix"] is None
    for name in set(of_doctor.COMMUNICATORS) - {"pure_nccl"}:
        assert found["by_name"][f"communicator_{name}"]["status"] == "ok"
    flat = found["by_name"]["communicator_flat"]["details"]
    assert 0 < flat["bytes_per_second"] < 100 * flat["copied_bytes_per_second"]


# Put in the ranks' way: at a communicator, rank 1 does something else.
FAULT = """
import os
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    import chainermn_comm
    real = chainermn_comm.create_communicator
    def create_communicator(name, world, *more, **options):
        if name == "two_dimensional" and world.size > 1 and world.rank == 1:
            {fault}
        return real(name, world, *more, **options)
    chainermn_comm.create_communicator = create_communicator
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("import time; time.sleep(3600)", "0 of 2 ranks came through it within"),
        (
            "os.kill(os.getpid(), 11)",
            "0 of 2 ranks came through it; then the job ended",
        ),
        (
            "raise MemoryError('planted')",
            "0 of 2 ranks came through it; then the job ended",
        ),
    ],
    ids=["hang", "crash", "raise"],
)
def test_a_rank_that_comes_to_grief_in_a_communicator_is_named(tmp_path, fault, said):
    (tmp_path / "sitecustomize.py").write_text(FAULT.format(fault=fault))
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    seconds = LONG_SECONDS if "sleep" in fault else LIMIT_SECONDS
    found = report("--timeout", seconds, PYTHONPATH=path)
    assert found["bad"] == ["communicator_two_dimensional"]
    assert said in found["by_name"]["communicator_two_dimensional"]["found"]
    assert found["by_name"]["communicator_hierarchical"]["status"] == "ok"
    assert found["by_name"]["communicator_dummy"]["details"] == {
        "because": "communicator_two_dimensional"
    }
    assert left_over(str(tmp_path)) == []


def left_over(text: str) -> list[int]:
    """Processes whose environment mentions the text."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if text.encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
    return found


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_a_signal_ends_all_that_was_started(tmp_path, number):
    pids = tmp_path / "pids"
    hang = (
        f"setsid sh -c 'echo $$ >> {pids}; sleep 3600' &\necho $$ >> {pids}; sleep 3600"
    )
    script = f'#!/bin/sh\n[ "$1" = --version ] || exit 1\n{hang}\n'
    path = commands.with_program(tmp_path, "mpiexec", script)
    how = {"stdout": subprocess.PIPE, "env": commands.environment(PATH=path)}
    process = commands.start("doctor", "--json", **how)
    assert soon(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, out) == (128 + number, "")
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


def test_what_is_on_standard_input_is_left_to_others(tmp_path):
    """As in a shell's `while read host; do chainermn doctor ...; done < hosts`."""
    version = f'if [ "$1" = --version ]; then exec "{MPIEXEC}" --version; fi'
    script = f"#!/bin/sh\n{version}\ncat > {tmp_path}/read\n"
    path = commands.with_program(tmp_path, "mpiexec", script)
    ours, theirs = os.pipe()
    os.write(theirs, b"host\n")  # and it stays open
    process = commands.start(
        "doctor",
        stdin=ours,
        stdout=subprocess.DEVNULL,
        env=commands.environment(PATH=path),
    )
    assert process.wait(LIMIT_SECONDS) in (0, 1, 3)
    assert (tmp_path / "read").read_text() == ""
    assert os.read(ours, 100) == b"host\n"
    for file in (ours, theirs):
        os.close(file)


# The command line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hosts", "a", "--hostfile", "b"], "exclude each other"),
        (["--json", "--report"], "exclude each other"),
        (["--hosts", "a; reboot"], "is no host"),
        (["--hosts", "-oProxyCommand=reboot"], "is no host"),
        (["--hostfile", "/nonexistent/hosts"], "can't be read"),
        (["--script", "x.py"], "--hosts"),
        (["--timeout", "1"], "10"),
        (["--timeout", "nan"], "nan is no number of seconds"),
        (["--timeout", "inf"], "86400"),
        (["-n", "0"], "0"),
    ],
)
def test_wrong_command_lines_are_refused_before_anything_is_started(
    machine, arguments, said
):
    done = machine.command(*arguments)
    assert (done.exit_code, said in done.output) == (2, True)


def test_it_refuses_to_run_as_a_rank(machine):
    machine.plant(PMI_RANK="0")
    assert "without mpiexec" in machine.command().output


PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
names = st.text() | st.text(";'\" $`&|<>(){}*?!~\\-a.:0", min_size=1)


def asked_of(*arguments: object) -> tuple[int, dict]:
    """The exit status, and what the checks are asked for."""
    with pytest.MonkeyPatch.context() as patch:
        done = Machine(patch, Path()).command("--json", *arguments)
    return done.exit_code, json.loads(done.output)[
        "asked"
    ] if done.exit_code == 0 else {}


@settings(max_examples=50)
@given(names)
def test_only_plain_names_of_hosts_go_on(name):
    status, asked = asked_of(f"--hosts={name}")
    assert status in (0, 2)
    assert all(PLAIN.fullmatch(host["name"]) for host in asked.get("hosts", ()))


@settings(max_examples=50)
@given(st.text())
def test_a_hostfile_of_any_content_is_for_a_check_to_judge(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any hostfile"
    path.write_text(content, encoding="utf-8", errors="replace")
    status, asked = asked_of("--hostfile", path)
    assert status == 0
    assert all(PLAIN.fullmatch(host["name"]) for host in asked["hosts"])


def test_what_was_asked_for_is_reported(tmp_path):
    (tmp_path / "hosts").write_text("a:2\nb slots=3\n")
    hostfile, script = f"{tmp_path}/hosts", f"{tmp_path}/x.py"
    named = ["-n", 5, "--hostfile", hostfile, "--script", script]
    hosts = [{"name": "a", "slots": 2}, {"name": "b", "slots": 3}]
    asked = {"ranks": 5, "hosts": hosts, "hostfile": hostfile, "script": script}
    assert asked_of(*named) == (0, asked)


# What is printed

SAID = "it " + "is bad and " * 12 + "long"
FIX = "export A=1   # and more"
PLANTED = {
    "python": ok("what was found"),
    "import_chainermn": warning("so so", FIX),
    "mpiexec": failed(SAID, FIX),
    "scheduler": skipped("nothing to look at"),
}


def prose(text: str) -> list[str]:
    """The lines that are wrapped; a fix isn't, so that it can be copied."""
    return [
        line
        for line in text.splitlines()
        if "fix:" not in line and "left out" not in line
    ]


def test_plain_text_has_a_line_for_each_thing(machine):
    done = machine.command(**PLANTED)
    lines = done.output.splitlines()
    assert done.exit_code == 1
    assert lines[0] == "This machine"
    assert re.fullmatch("  ok       python  +what was found", lines[1])
    bad = next(
        number for number, line in enumerate(lines) if line.startswith("  FAILED")
    )
    assert re.fullmatch("  FAILED   mpiexec  +Is there an mpiexec .*", lines[bad])
    assert lines[bad + 1 : bad + 3] == [f"    {SAID}", f"    fix: {FIX}"]
    assert any(
        re.fullmatch("  -        scheduler  +nothing to look at", line)
        for line in lines
    )
    assert "    1 check was left out, since 'mpiexec' failed" in lines
    assert "Ranks on this machine" in lines
    assert lines[-2:] == [
        "",
        "Not all is well; failed: mpiexec; warned of: import_chainermn; "
        "not checked: GPUs and other hosts.",
    ]


@pytest.mark.parametrize("width", [120, 60])
@pytest.mark.parametrize("colours", [True, False])
def test_terminals_get_lines_that_fit_and_colours_if_wanted(machine, width, colours):
    machine.plant(
        FORCE_COLOR="1",
        COLUMNS=str(width),
        TERM="xterm",
        NO_COLOR=None if colours else "1",
    )
    printed = machine.command(**PLANTED).output
    assert ("\x1b[1;31m" in printed) == colours
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    assert max(map(len, prose(plain)[:-1])) <= width
    assert f"fix: {FIX}" in plain
    assert "long" in plain


def test_all_well_and_what_is_worst_are_said(machine):
    well = "All is well; not checked:"
    for planted, unseen in (
        ({}, "other hosts"),
        ({"communicator_pure_nccl": skipped("no GPU")}, "GPUs and other hosts"),
    ):
        assert machine.command(**planted).output.splitlines()[-1] == f"{well} {unseen}."
    assert machine.command("--hosts", "a").output.splitlines()[-1] == "All is well."
    for arguments, planted, status, worst in (
        ((), {"scheduler": skipped("nothing")}, 0, "ok"),
        (("--hosts", "a"), {"slots": warning("so so", "mend it")}, 3, "warning"),
        ((), PLANTED, 1, "failed"),
    ):
        done = machine.command("--json", *arguments, **planted)
        found = json.loads(done.output)
        assert (done.exit_code, found["status"], found["well"]) == (
            status,
            worst,
            worst == "ok",
        )


def test_a_report_holds_findings_and_environment_without_secrets(machine):
    machine.plant(SLURM_JWT="eyJ-secret")
    machine.program("mpiexec", 'echo "no licence found"; exit 7')
    done = machine.command("--report", mpiexec=failed("it fails", "mend it"))
    assert done.exit_code == 1
    assert done.output.startswith(
        "<details><summary>chainermn doctor: Not all is well; failed: "
    )
    assert done.output.rstrip().endswith("</details>")
    assert "\npackages\n" in done.output, "what chainermn env prints"
    assert "no licence found" in done.output
    assert "SLURM_JWT" in done.output
    assert "eyJ-secret" not in done.output


def test_in_a_real_terminal_lines_fit(tmp_path):
    """With an mpiexec of another MPI, so that it takes no long."""
    script = "#!/bin/sh\necho 'Intel(R) MPI Library, Version 2021.10'\n"
    path = commands.with_program(tmp_path, "mpiexec", script)
    variables = commands.environment(PATH=path, TERM="xterm-256color")
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        variables.pop(name, None)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 60, 0, 0))
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = commands.start("doctor", env=variables, **streams)
    os.close(theirs)
    printed = b""
    with suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(ours, 1 << 16):
            printed += piece
    os.close(ours)
    assert process.wait(LIMIT_SECONDS) == 1
    shown = printed.decode()
    assert "\x1b[1;31m" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert "FAILED" in plain
    assert max(map(len, prose(plain))) <= 60


# The manual


def test_the_manual_lists_every_check_with_its_question_once():
    rows = re.findall(r"^\| `([^`]+)` \| (.+?\?) \|", MANUAL.read_text(), re.MULTILINE)
    assert rows == of_doctor.QUESTIONS
    assert len({name for name, _ in rows}) == len(rows)
    assert list(STAGES) == ["here", "live", "hosts"]


def documented_keys(begin: str, end: str) -> set[str]:
    """The keys in the table between two texts of the manual."""
    part = MANUAL.read_text().split(begin)[1].split(end)[0]
    keys = set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE))
    assert keys
    return keys
