"""Names and paths that are no names and paths but traps, on their way to ssh and through shells."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.tools.doctor import Machine, said_by

TRAPS = [
    *(
        "a b",
        "'",
        '"',
        ";touch trap",
        "$(touch trap)",
        "`touch trap`",
        "-oProxyCommand=touch trap",
    ),
    *(
        "-l",
        "--",
        "#",
        "\n",
        "a\ntouch trap\n",
        "\\",
        "\\'; touch trap; '",
        "%h",
        "!!",
        "~",
        "*",
    ),
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
    ),
    "x'\n\"$(id)",
]
texts = st.one_of(
    st.sampled_from(TRAPS),
    st.lists(st.sampled_from(TRAPS), max_size=4).map("".join),
    st.text(max_size=20),
)
# What can be the name of a file, of bytes that may be no text.
file_names = st.one_of(
    texts.map(lambda text: text.encode(errors="ignore")),
    st.binary(min_size=1, max_size=30),
).map(lambda name: os.fsdecode(name.replace(b"/", b"_").replace(b"\0", b"_")[:200]))
# As sshd starts what ssh was told: by the login shell, whichever that is.
SHELLS = {
    os.path.realpath(found): shell
    for shell in ("bash", "dash", "zsh", "ksh", "csh", "tcsh", "fish", "sh")
    if (found := shutil.which(shell))
}.values()


@pytest.mark.parametrize("shell", SHELLS)
@settings(max_examples=6)
@given(name=file_names, python=file_names)
def test_a_path_reaches_a_host_whole_and_runs_nothing(shell, name, python):
    assume(name not in ("", ".", "..") and python not in ("", ".", ".."))
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as elsewhere,
    ):
        script = os.path.join(folder, name)
        Path(script).write_text("")
        said = said_by(shell, os.path.join(elsewhere, python), script, elsewhere)
        # There is none, or it is a folder.
        assert said in ({"status": 127}, {"status": 126})
        for path, there in ((script, True), (script + "?", False)):
            assert (
                said_by(shell, sys.executable, path, elsewhere)["script"]["there"]
                == there
            )
        assert os.listdir(elsewhere) == []
        assert os.listdir(folder) == [name]


@settings(max_examples=5)
@given(name=file_names)
def test_a_path_reaches_python_whole(name):
    # A path of Python's is a line.
    assume(name not in ("", ".", "..") and "\n" not in name)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as elsewhere,
    ):
        # Also of the interpreter.
        interpreter = os.path.join(elsewhere, name)
        os.symlink(sys.executable, interpreter)
        script = os.path.join(folder, name)
        Path(script).write_text("")
        said = said_by("sh", interpreter, script, folder)
        assert said["script"]["there"]
        assert said["python"]["version"] == platform.python_version()
        assert os.listdir(folder) == os.listdir(elsewhere) == [name]


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_in_place_of_a_name_never_reaches_ssh(machine, says, name):
    """Even where nobody has looked at the name before."""
    machine.quick_here()
    machine.program("ssh", f"touch {machine.folder}/asked")
    says("ssh", "failed", "is no name of a host", hosts=["a", name])
    assert not (machine.folder / "asked").exists()


# Records its words.
RECORDING = 'for word; do printf "%s\\0" "$word"; done > {}/words.$$'


@settings(max_examples=12)
@given(script=texts)
def test_nothing_that_a_user_writes_becomes_an_option_or_code(script):
    assume("\0" not in script)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        machine = Machine(patch, Path(folder))
        machine.quick_here()
        os.mkdir(f"{folder}/current")
        patch.chdir(f"{folder}/current")
        for host, named in (("a", "script"), ("b-1.c", script or "script")):
            machine.look(
                "ssh",
                hosts=host,
                script=named,
                mpi="MPICH",
                ssh=RECORDING.format(folder),
            )
        assert os.listdir() == []
        sent = {path.read_text() for path in Path(folder).glob("words.*")}
    assert len(sent) == 2
    same = {words.replace("\0--\0b-1.c\0", "\0--\0a\0") for words in sent}
    assert len(same) == 1, "nothing differs but the host's name, after all options"


@settings(max_examples=30)
@given(
    text=st.one_of(texts, st.lists(texts, max_size=5).map("\n".join)),
    vendor=st.sampled_from(["MPICH", "Open MPI", None]),
)
def test_a_hostfile_of_anything_gives_an_answer_and_names_no_trap(text, vendor):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        found = Machine(patch, Path(folder)).hostfile(text, vendor)
    assert found.status in ("ok", "failed")
    assert "the check itself failed" not in found.message
