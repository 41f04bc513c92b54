"""The command line of mpiexec, of both MPIs. No job is started."""

import ast
import shlex
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import chainermn_tools
from chainermn_tools.launch import command_line

MPICH = {"path": "/opt/mpi ch/bin/mpiexec", "vendor": "MPICH", "version": "5.0.2"}
OPEN_MPI = {"path": "/opt/ompi/bin/mpiexec", "vendor": "Open MPI", "version": "5.0.11"}
NASTY = ["", " ", "a b", "'", '"', ";", "$(touch x)", "`touch x`", "*", "-n", "#", "\n", "\\", ":"]
any_word = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def words_of(mpiexec, *arguments, dealt=None, prefix=False, threads=1, script="train.py"):
    names = ["PATH", "PYTHONPATH", "CHAINERMN_LAUNCH", "OMP_NUM_THREADS", "HOME"]
    return command_line.command_line(
        mpiexec, 2, dealt or {}, prefix, threads, names, script, arguments
    )


def test_command_line_of_mpich():
    words = words_of(MPICH, "--epoch", "3", dealt={"a": 1, "b": 1}, prefix=True)
    assert words == [
        *("/opt/mpi ch/bin/mpiexec", "-prepend-rank", "-hosts", "a:1,b:1", "-n", "2"),
        *(sys.executable, "-m", "chainermn_tools.launch.rank", "train.py", "--epoch", "3"),
    ]


def test_command_line_of_open_mpi(monkeypatch):
    monkeypatch.setattr(command_line, "cores", lambda: {"usable": 2})
    ranks = ["-n", "2", sys.executable, "-m", "chainermn_tools.launch.rank", "train.py"]
    assert words_of(OPEN_MPI) == [OPEN_MPI["path"], *ranks]
    monkeypatch.setattr(command_line, "cores", lambda: {"usable": 1})
    assert words_of(OPEN_MPI) == [OPEN_MPI["path"], "--map-by", "slot:OVERSUBSCRIBE", *ranks]
    words = words_of(OPEN_MPI, dealt={"a": 2}, prefix=True, threads=4)
    passed = [words[at + 1] for at, word in enumerate(words) if word == "-x"]
    assert passed == ["CHAINERMN_LAUNCH", "OMP_NUM_THREADS", "PYTHONPATH"]
    assert words[1:5] == ["--output", "tag", "--host", "a:2"]
    for threads in (4, None):  # None: the user set OMP_NUM_THREADS
        words = words_of(OPEN_MPI, threads=threads)
        assert words[words.index("--bind-to") + 1] == "none"
    assert "--tag-output" in words_of({**OPEN_MPI, "version": "4.1.6"}, prefix=True)


@settings(max_examples=200)
@given(any_word, st.lists(any_word | st.sampled_from(NASTY) | st.from_regex(r"\A\\*:\Z")))
def test_script_and_arguments_stay_single_words_and_no_colon_ends_the_program(script, arguments):
    for mpiexec in (MPICH, OPEN_MPI):
        words = words_of(mpiexec, *arguments, script=script)
        mine = words[words.index(command_line.RANK_MODULE) + 1 :]
        assert ":" not in mine
        assert [command_line.unescape(word) for word in mine] == [script, *arguments]
        assert shlex.split(shlex.join(words)) == words  # as it is printed


SHELLS = ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput")


def test_nothing_in_the_package_asks_a_shell():
    for file in Path(chainermn_tools.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword):
                assert node.arg != "shell", f"{file}:{node.value.lineno}"
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in SHELLS, f"{file}:{node.lineno}"


def test_threads_divide_the_cores_unless_the_user_chose(monkeypatch):
    monkeypatch.setattr(command_line, "cores", lambda: {"usable": 8})
    for name in command_line.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert [command_line.threads_for(ranks, {}) for ranks in (2, 3, 20)] == [4, 2, 1]
    assert command_line.threads_for(6, {"a": 4, "b": 2}) == 2
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    assert command_line.threads_for(2, {}) is None
