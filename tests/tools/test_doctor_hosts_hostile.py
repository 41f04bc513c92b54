"""Names and paths that are no names and paths but traps, on their way to ssh and through shells."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chainermn_tools.doctor import facts
from chainermn_tools.doctor.check import Context
from chainermn_tools.doctor.hosts import bootstrap, ssh
from chainermn_tools.doctor.hosts.hostfiles import hostfile
from chainermn_tools.doctor.hosts.remote import MARK
from chainermn_tools.doctor.hosts.round import ask
from chainermn_tools.launch.hosts import Host, from_file, from_list

SECONDS = 60.0
TRAPS = [
    *("a b", "'", '"', ";touch trap", "$(touch trap)", "`touch trap`", "-oProxyCommand=touch trap"),
    *("-l", "--", "#", "\n", "a\ntouch trap\n", "\\", "\\'; touch trap; '", "%h", "!!", "~", "*"),
    *(
        "&touch trap",
        "|touch trap",
        ">trap",
        "a\n",
        "$HOME",
        "é",
        "\x7f",
        "\t",
        "{a,b}",
        "x'\n\"$(id)",
    ),
]
texts = st.one_of(
    st.sampled_from(TRAPS),
    st.lists(st.sampled_from(TRAPS), max_size=4).map("".join),
    st.text(max_size=20),
)
# What can be the name of a file, of bytes that may be no text.
file_names = st.one_of(
    texts.map(lambda text: text.encode(errors="ignore")), st.binary(min_size=1, max_size=30)
).map(lambda name: os.fsdecode(name.replace(b"/", b"_").replace(b"\0", b"_")[:200]))
# As sshd starts what ssh was told: by the login shell, whichever that is.
SHELLS = {
    os.path.realpath(found): shell
    for shell in ("bash", "dash", "zsh", "ksh", "csh", "tcsh", "fish", "sh")
    if (found := shutil.which(shell))
}.values()
JOB = {
    "seconds": 60,
    "token": "t",
    "packages": [],
    "families": ["cupy"],
    "mpiexec": None,
    "program_seconds": 5,
}


def said_by(shell: str, python: str, script: str, folder: str) -> dict:
    """What a host would say that has such a login shell."""
    lines = bootstrap.first_lines(python, script, JOB)
    done = subprocess.run(
        [shell, "-c", bootstrap.COMMAND],
        input=lines.encode(),
        capture_output=True,
        cwd=folder,
        timeout=SECONDS,
        check=False,
    )
    answers = [line for line in done.stdout.split(b"\n") if line.startswith(MARK.encode())]
    assert len(answers) == 1, done
    return json.loads(answers[0][len(MARK) :])


@pytest.mark.parametrize("shell", SHELLS)
@settings(max_examples=10, deadline=None)
@given(name=file_names, python=file_names)
def test_a_path_reaches_a_host_whole_and_runs_nothing(shell, name, python):
    assume(name not in ("", ".", "..") and python not in ("", ".", ".."))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as elsewhere:
        script = os.path.join(folder, name)
        Path(script).write_text("")
        for path, there in ((script, True), (script + "?", False)):
            said = said_by(shell, os.path.join(elsewhere, python), path, elsewhere)
            assert bootstrap.without_python(said)["script"]["there"] == there
        assert os.listdir(elsewhere) == []
        assert os.listdir(folder) == [name]


@settings(max_examples=5, deadline=None)
@given(name=file_names)
def test_a_path_reaches_python_whole(name):
    assume(name not in ("", ".", ".."))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as elsewhere:
        # Also of the interpreter.
        interpreter = os.path.join(elsewhere, name)
        os.symlink(sys.executable, interpreter)
        script = os.path.join(folder, name)
        Path(script).write_text("")
        said = said_by("sh", interpreter, script, folder)
        assert said["script"]["there"]
        assert said["python"]["version"] == platform.python_version()
        assert os.listdir(folder) == os.listdir(elsewhere) == [name]


@given(texts)
def test_ssh_is_given_names_of_hosts_alone(text):
    try:
        words = ssh.command(["ssh"], text, bootstrap.COMMAND, 5)
    except ValueError:
        return
    assert words[-3:] == ["--", text, bootstrap.COMMAND]
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert not text.startswith("-")


@pytest.fixture(scope="module")
def fake_ssh(tmp_path_factory) -> Path:
    """Notes its arguments, and does as the host would that is this machine itself."""
    folder = tmp_path_factory.mktemp("ssh")
    agent = folder / "ssh"
    agent.write_text(
        f'#!/bin/sh\nfor word; do printf "%s\\0" "$word"; last=$word; done > {folder}/words.$$\n'
        'exec sh -c "$last"\n'
    )
    agent.chmod(0o755)
    return agent


serials = itertools.count()


@settings(max_examples=12, deadline=None)
@given(hosts=texts, script=texts)
def test_nothing_that_a_user_writes_becomes_an_option_or_code(fake_ssh, hosts, script):
    folder = fake_ssh.parent / str(next(serials))
    folder.mkdir()
    try:
        named = from_list(hosts)
    except ValueError:
        named = (Host("good-name", None),)  # so that the script's path is tried in any case
    before = os.getcwd()
    os.chdir(folder)
    try:
        context = Context(time.monotonic() + SECONDS, hosts=named, script=script or "script")
        context.answers[facts.launcher] = lambda *_: {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ssh, "agent", lambda vendor: [str(fake_ssh)])
            ask(context) if "\0" not in script else None
    finally:
        os.chdir(before)
    assert os.listdir(folder) == []
    for noted in fake_ssh.parent.glob("words.*"):
        *options, dashes, host, command = noted.read_bytes().decode().split("\0")[:-1]
        assert dashes == "--"
        assert host in {one.name for one in named}
        assert command == bootstrap.COMMAND
        assert options[:-1] == [*ssh.OPTIONS, "-o"]
        assert options[-1].startswith("ConnectTimeout=")
        noted.unlink()


@given(
    text=st.one_of(texts, st.lists(texts).map("\n".join)),
    vendor=st.sampled_from(["MPICH", "Open MPI", None]),
)
def test_a_hostfile_of_anything_gives_an_answer_and_names_no_trap(text, vendor):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hosts"
        path.write_text(text, errors="surrogatepass")
        context = Context(time.monotonic() + SECONDS, hostfile=str(path))
        context.answers[facts.launcher] = lambda *_: {"vendor": vendor}
        answer = hostfile.look(context)
    try:
        hosts = from_file(text, "f")
    except ValueError:
        assert answer.status == "failed"
        return
    assert all(ssh.command(["ssh"], host.name, "x", 1)[-2] == host.name for host in hosts)
