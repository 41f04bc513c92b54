"""`chainermn doctor` as a user runs it: where all is well, planted faults, hangs, terminals."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from chainermn_tools.commands.doctor import _hosts, doctor
from chainermn_tools.doctor import ALL, text
from chainermn_tools.doctor.check import Finding, Status
from chainermn_tools.doctor.live import steps
from tests.support.processes import is_gone

BIN = Path(sys.executable).parent
MANUAL = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
# Ends a test that hangs; the doctor ends by itself, and in less unless it hangs.
LIMIT_SECONDS = 200
# What one that hangs is given. It includes starting Python, on a machine that is busy otherwise.
SHORT_SECONDS, LONG_SECONDS = 12, 90
BASE = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("CHAINERMN_", "SLURM_")) and not name.endswith("_NUM_THREADS")
}


def start(*arguments: object, before: Path | None = None, **variables: str):
    """The doctor, started; with a folder before all others on PATH."""
    path = os.pathsep.join([*([str(before)] if before else []), str(BIN), BASE["PATH"]])
    return subprocess.Popen(
        [sys.executable, "-m", "chainermn_tools", "doctor", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**BASE, "PATH": path, **variables},
    )


def run(*arguments: object, **settings) -> tuple[int, str, str]:
    process = start(*arguments, **settings)
    out, err = process.communicate(timeout=2 * LIMIT_SECONDS)
    return process.returncode, out, err


def report(*arguments: object, **settings) -> dict:
    """What --json prints; findings by name, and those that are not well as `bad`."""
    status, out, err = run("--json", *arguments, **settings)
    found = json.loads(out)
    assert status == {"ok": 0, "failed": 1, "warning": 3}[found["status"]], err
    found["by_name"] = {one["name"]: one for one in found["findings"]}
    found["bad"] = [
        one["name"] for one in found["findings"] if one["status"] in ("failed", "warning")
    ]
    return found


def program(folder: Path, body: str, name: str = "mpiexec") -> Path:
    """A program of Hydra's kind: it says a version, and then does what the body says."""
    folder.mkdir(parents=True, exist_ok=True)
    version = 'if [ "$1" = --version ]; then echo "HYDRA build details: Version: 4.2.0"; exit; fi'
    (folder / name).write_text(f"#!/bin/sh\n{version}\n{body}\n")
    (folder / name).chmod(0o755)
    return folder


def test_all_is_well_where_nothing_is_wrong():
    found = report("--timeout", LIMIT_SECONDS)
    assert found["bad"] == []
    assert set(found) - {"by_name", "bad"} == documented_keys("## JSON", "A finding:")
    assert (found["schema"], found["well"], found["status"]) == (1, True, "ok")
    assert found["asked"] == {"ranks": None, "hosts": [], "hostfile": None, "script": None}
    assert found["seconds"] > 0
    assert [one["layer"] for one in found["findings"]] == sorted(
        one["layer"] for one in found["findings"]
    )
    for one in found["findings"]:
        assert set(one) == documented_keys("A finding:", "## The checks")
        assert one["found"]
        assert one["fix"] is None
    for name in set(steps.COMMUNICATORS) - {"pure_nccl"}:
        assert found["by_name"][f"communicator {name}"]["status"] == "ok"
    flat = found["by_name"]["communicator flat"]["details"]
    assert 0 < flat["bytes_per_second"] < 100 * flat["copied_bytes_per_second"]


def test_an_mpiexec_whose_ranks_are_alone_is_named(tmp_path):
    each = 'while [ "$1" != -n ]; do shift; done; n=$2; shift 2; for i in $(seq $n); do "$@" & done'
    found = report("--timeout", LIMIT_SECONDS, before=program(tmp_path, f"{each}; wait"))
    assert found["bad"] in (["ranks meet"], ["mpi match"]), "the latter with Open MPI"
    bad = found["by_name"][found["bad"][0]]
    assert str(tmp_path / "mpiexec") in bad["found"]
    assert "PATH" in bad["fix"]


def test_an_mpi_that_hangs_at_its_start_is_named_in_time_and_leaves_nothing(tmp_path):
    pids = tmp_path / "pids"
    body = f"setsid sh -c 'echo $$ >> {pids}; sleep 3600' &\necho $$ >> {pids}; sleep 3600"
    began = time.monotonic()
    found = report("--timeout", SHORT_SECONDS, before=program(tmp_path / "bin", body))
    took = time.monotonic() - began
    for pid in pids.read_text().split() if pids.exists() else ():
        assert is_gone(int(pid))
    late = [name for name in found["bad"] if "within" in found["by_name"][name]["found"]]
    if late == ["ranks start"]:  # else the machine is too busy to come so far
        assert found["bad"] == ["ranks start"]
        assert "mpiexec hangs" in found["by_name"]["ranks start"]["found"]
        assert len(pids.read_text().split()) == 2
    assert late or found["bad"] == ["mpi match"], "the latter with Open MPI"
    assert found["seconds"] <= SHORT_SECONDS
    assert took < SHORT_SECONDS + 30, "Python's own start and end, on a busy machine"


# Put in the ranks' way: at a step, rank 1 does something else.
FAULT = """
import os, sys
if "chainermn_tools.launch.rank" in sys.orig_argv and os.environ.get("PMI_RANK", "1") == "1":
    from chainermn_tools.doctor.live import trying
    real = trying.communicator
    def communicator(world, name):
        if name == "two_dimensional" and world.rank == 1:
            {fault}
        return real(world, name)
    trying.communicator = communicator
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("import time; time.sleep(3600)", "it hangs: 0 of 2 ranks came through it"),
        ("os.kill(os.getpid(), 11)", "0 of 2 ranks came through it; then the job ended"),
        ("raise MemoryError('planted')", "0 of 2 ranks came through it; then the job ended"),
    ],
    ids=["hang", "crash", "raise"],
)
def test_a_rank_that_comes_to_grief_in_a_communicator_is_named(tmp_path, fault, said):
    (tmp_path / "sitecustomize.py").write_text(FAULT.format(fault=fault))
    path = os.pathsep.join([str(tmp_path), BASE.get("PYTHONPATH", "")])
    seconds = LONG_SECONDS if "sleep" in fault else LIMIT_SECONDS
    found = report("--timeout", seconds, PYTHONPATH=path)
    assert found["bad"] == ["communicator two_dimensional"]
    assert said in found["by_name"]["communicator two_dimensional"]["found"]
    assert found["by_name"]["communicator hierarchical"]["status"] == "ok"
    assert found["by_name"]["communicator dummy"]["details"] == {
        "because": "communicator two_dimensional"
    }
    assert left_over(str(tmp_path)) == []


@pytest.mark.full
def test_an_mpiexec_that_does_not_even_say_its_version_is_named(tmp_path):
    (tmp_path / "mpiexec").write_text("#!/bin/sh\nsleep 3600\n")
    (tmp_path / "mpiexec").chmod(0o755)
    found = report("--timeout", LONG_SECONDS, before=tmp_path)
    assert found["bad"] == ["mpiexec"]
    assert found["seconds"] <= LONG_SECONDS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_that_was_started(tmp_path, number):
    pids = tmp_path / "pids"
    body = f"setsid sh -c 'echo $$ >> {pids}; sleep 3600' &\necho $$ >> {pids}; sleep 3600"
    version = '#!/bin/sh\n[ "$1" = --version ] || exit 1\n'
    (tmp_path / "mpiexec").write_text(version + body + "\n")
    (tmp_path / "mpiexec").chmod(0o755)
    process = start("--json", before=tmp_path)
    end = time.monotonic() + LIMIT_SECONDS
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, out) == (128 + number, "")
    for pid in pids.read_text().split():
        assert is_gone(int(pid))


def test_a_report_holds_findings_and_environment_without_secrets(tmp_path):
    body = 'echo "no licence found"; exit 7'
    status, out, _ = run("--report", before=program(tmp_path, body), SLURM_JWT="eyJ-secret")
    assert status == 1
    assert out.startswith("<details><summary>chainermn doctor: Not all is well; failed: ")
    assert out.rstrip().endswith("</details>")
    assert "\npackages\n" in out, "what chainermn env prints"
    assert "SLURM_JWT" in out
    assert "eyJ-secret" not in out


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
def test_wrong_command_lines_are_refused_before_anything_is_started(arguments, said):
    done = CliRunner().invoke(doctor, arguments)
    assert (done.exit_code, said in done.output) == (2, True)


def test_it_refuses_to_run_as_a_rank(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    assert "without mpiexec" in CliRunner().invoke(doctor, []).output


@given(st.text() | st.from_regex(r"[a-z]+[;'\" $`&|<>(){}*?!~\\-]+[a-z]*(:\d+)?"))
def test_only_plain_names_of_hosts_go_on(name):
    try:
        hosts = _hosts(name, None)
    except ValueError:
        return
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host.name) for host in hosts)


@given(st.text())
def test_a_hostfile_of_any_content_is_for_a_check_to_judge(content):
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="replace") as file:
        file.write(content)
        file.flush()
        for host in _hosts(None, file.name):
            assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host.name)


# Text


def finding(status: Status, name: str = "one", found: str = "what was found", **more) -> Finding:
    fix = "export A=1   # and more" if status in ("warning", "failed") else None
    return Finding("here", name, "Is it well?", status, found, fix, **more)


FINDINGS = [
    finding("ok", "first"),
    finding("failed", "second", "it " + "is bad and " * 12 + "long"),
    finding("warning", "third"),
    finding("skipped", "fourth", "nothing to look at"),
    finding("skipped", "fifth", details={"because": "second"}),
    finding("skipped", "sixth", details={"because": "second"}),
]


def shown(width: int, terminal: bool, colours: bool = True) -> str:
    from chainermn_tools.doctor.check import Check, ok
    from chainermn_tools.doctor.runner import Layer

    checks = tuple(Check(one.name, one.question, lambda _: ok("")) for one in FINDINGS)
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=terminal,
        no_color=not colours,
        color_system="standard",
    )
    text.show_all([Layer("here", "This machine", checks, 1.0)], FINDINGS, console)
    return file.getvalue()


def test_plain_text_has_a_line_for_each_thing():
    lines = shown(80, terminal=False).splitlines()
    assert lines[:5] == [
        "This machine",
        "  ok       first   what was found",
        "  FAILED   second  Is it well?",
        f"    {FINDINGS[1].found}",
        "    fix: export A=1   # and more",
    ]
    assert lines[-4:] == [
        "  -        fourth  nothing to look at",
        "    2 checks were left out, since 'second' failed",
        "",
        "Not all is well; failed: second; warned of: third.",
    ]


@pytest.mark.parametrize("width", [120, 60])
@pytest.mark.parametrize("colours", [True, False])
def test_terminals_get_lines_that_fit_and_colours_if_wanted(width, colours):
    printed = shown(width, terminal=True, colours=colours)
    assert ("\x1b[1;31m" in printed) == colours
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    assert max(map(len, plain.splitlines())) <= width
    assert "fix: export A=1   # and more" in plain
    assert "long" in plain


def test_all_well_is_said():
    assert text.summary([finding("ok"), finding("skipped")]) == "All is well."
    assert text.worst([finding("warning"), finding("ok")]) == "warning"
    assert text.worst([finding("warning"), finding("failed")]) == "failed"


@pytest.mark.parametrize(("width", "no_colour"), [(120, ""), (60, "1")])
def test_in_a_real_terminal_lines_fit(tmp_path, width, no_colour):
    """With an mpiexec of another MPI, so that it takes no long."""
    (tmp_path / "mpiexec").write_text("#!/bin/sh\necho 'Intel(R) MPI Library, Version 2021.10'\n")
    (tmp_path / "mpiexec").chmod(0o755)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    path = os.pathsep.join([str(tmp_path), str(BIN), BASE["PATH"]])
    variables = {**BASE, "PATH": path, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "NO_COLOR"):
        variables.pop(name, None)
    if no_colour:
        variables["NO_COLOR"] = no_colour
    process = subprocess.Popen(
        [sys.executable, "-m", "chainermn_tools", "doctor"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=variables,
    )
    os.close(theirs)
    printed = b""
    with suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(ours, 1 << 16):
            printed += piece
    os.close(ours)
    assert process.wait(LIMIT_SECONDS) == 1
    shown = printed.decode()
    assert ("\x1b[1;31m" in shown) == (not no_colour)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert "FAILED" in plain
    prose = [
        line for line in plain.splitlines() if "fix:" not in line and "checks were" not in line
    ]
    assert max(map(len, prose)) <= width


# The manual


def test_the_manual_lists_every_check_with_its_question():
    rows = re.findall(r"^\| `([^`]+)` \| (.+?\?) \|", MANUAL.read_text(), re.MULTILINE)
    assert rows == [(check.name, check.question) for layer in ALL for check in layer.checks]


def documented_keys(begin: str, end: str) -> set[str]:
    """The keys in the table between two texts of the manual."""
    part = MANUAL.read_text().split(begin)[1].split(end)[0]
    keys = set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE))
    assert keys
    return keys


def test_names_are_unique_among_all_layers():
    names = [check.name for layer in ALL for check in layer.checks]
    assert len(set(names)) == len(names)
    assert [layer.name for layer in ALL] == ["here", "live", "hosts"]


def left_over(text: str) -> list[int]:
    """Processes whose environment mentions the text."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and text.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found
