"""The command line of mpiexec, of both MPIs. No job is started."""

import ast
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chainermn_tools
from chainermn_tools.jobs import mpiexec

MPICH = {"path": "/opt/mpi ch/bin/mpiexec", "vendor": "MPICH", "version": "5.0.2"}
OPEN_MPI = {"path": "/opt/ompi/bin/mpiexec", "vendor": "Open MPI", "version": "5.0.11"}
NASTY = [
    "",
    " ",
    "a b",
    "'",
    '"',
    ";",
    "$(touch x)",
    "`touch x`",
    "*",
    "-n",
    "#",
    "\n",
    "\\",
    ":",
]
any_word = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)


def words_of(
    launcher, *arguments, hosts=None, prefix=False, threads=1, script="train.py"
):
    names = ["PATH", "PYTHONPATH", "CHAINERMN_LAUNCH", "OMP_NUM_THREADS", "HOME"]
    return mpiexec.mpiexec_command(
        launcher,
        2,
        [script, *arguments],
        hosts=hosts,
        prefix=prefix,
        threads=threads,
        variables=names,
    )


def test_command_line_of_mpich():
    words = words_of(MPICH, "--epoch", "3", hosts={"a": 1, "b": 1}, prefix=True)
    assert words == [
        *("/opt/mpi ch/bin/mpiexec", "-prepend-rank", "-hosts", "a:1,b:1", "-n", "2"),
        *(sys.executable, "-m", "chainermn_tools.rank", "train.py", "--epoch", "3"),
    ]


def test_command_line_of_open_mpi(monkeypatch):
    monkeypatch.setattr(mpiexec, "available_cores", lambda: {"usable": 2})
    ranks = ["-n", "2", sys.executable, "-m", "chainermn_tools.rank", "train.py"]
    assert words_of(OPEN_MPI) == [OPEN_MPI["path"], *ranks]
    monkeypatch.setattr(mpiexec, "available_cores", lambda: {"usable": 1})
    assert words_of(OPEN_MPI) == [
        OPEN_MPI["path"],
        "--map-by",
        "slot:OVERSUBSCRIBE",
        *ranks,
    ]
    words = words_of(OPEN_MPI, hosts={"a": 2}, prefix=True, threads=4)
    passed = [words[at + 1] for at, word in enumerate(words) if word == "-x"]
    assert passed == ["CHAINERMN_LAUNCH", "OMP_NUM_THREADS", "PYTHONPATH"]
    assert words[1:5] == ["--output", "tag", "--host", "a:2"]
    for threads in (4, None):  # None: the user set OMP_NUM_THREADS
        words = words_of(OPEN_MPI, threads=threads)
        assert words[words.index("--bind-to") + 1] == "none"
    assert "--tag-output" in words_of({**OPEN_MPI, "version": "4.1.6"}, prefix=True)


def test_command_line_of_slurms_srun_places_each_rank(monkeypatch):
    monkeypatch.setattr(mpiexec.shutil, "which", lambda name: f"/usr/bin/{name}")
    words = words_of(
        mpiexec.find_srun("MPICH"), "x", hosts={"b": 2, "a": 1}, prefix=True
    )
    assert words[:2] == ["/usr/bin/srun", "--mpi=pmi2"]
    assert "--export=ALL,MPIR_CVAR_CH4_NETMOD=ofi" in words
    assert not [word for word in words if "kill-on-bad-exit" in word]
    assert {
        "--distribution=arbitrary",
        "--nodes=2",
        "--nodelist=b,b,a",
        "--label",
    } < set(words)
    assert words[-4:] == ["-m", "chainermn_tools.rank", "train.py", "x"]
    words = words_of(mpiexec.find_srun("Open MPI"), hosts={"a": 1})
    assert {"--mpi=pmix", "--export=ALL"} <= set(words)


def test_pythons_options_come_first_and_a_users_variables_go_to_all_hosts():
    words = mpiexec.mpiexec_command(
        OPEN_MPI,
        1,
        ["-m", "train"],
        flags=["-W", "error"],
        hosts={"a": 1},
        passed=["HOME"],
    )
    assert words[-6:] == ["-W", "error", "-m", "chainermn_tools.rank", "-m", "train"]
    assert [words[at + 1] for at, word in enumerate(words) if word == "-x"] == [
        "CHAINERMN_LAUNCH",
        "HOME",
    ]


@settings(max_examples=200)
@given(
    any_word, st.lists(any_word | st.sampled_from(NASTY) | st.from_regex(r"\A\\*:\Z"))
)
def test_script_and_arguments_stay_single_words_and_no_colon_ends_the_program(
    script, arguments
):
    for launcher in (MPICH, OPEN_MPI):
        words = words_of(launcher, *arguments, script=script)
        mine = words[words.index(mpiexec.rank.__name__) + 1 :]
        assert ":" not in mine
        assert [mpiexec.rank.unescape(word) for word in mine] == [script, *arguments]
        assert shlex.split(shlex.join(words)) == words  # as it is printed


SHELLS = ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput")


def test_nothing_in_the_package_asks_a_shell():
    for file in Path(chainermn_tools.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword):
                assert node.arg != "shell", f"{file}:{node.value.lineno}"
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in SHELLS, f"{file}:{node.lineno}"


HYDRA = "HYDRA build details:\n    Version:                                 4.2.0\n"


@pytest.mark.parametrize(
    ("printed", "vendor", "version"),
    [
        (HYDRA, "MPICH", "4.2.0"),
        (
            "mpiexec (OpenRTE) 4.1.6\n\nReport bugs to http://www.open-mpi.org/",
            "Open MPI",
            "4.1.6",
        ),
        ("mpiexec (Open MPI) 5.0.11\n", "Open MPI", "5.0.11"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 2023",
            "Intel MPI",
            "2021.10",
        ),
        (f"{HYDRA} Configure options: --prefix=/opt/mvapich2", "MVAPICH", "4.2.0"),
        ("prterun (PRRTE) 3.0.5", "Open MPI", "3.0.5"),
        ("slurm launcher", None, None),
    ],
)
def test_launchers_are_recognised(printed, vendor, version):
    assert mpiexec.parse_mpi_version(printed) == {"vendor": vendor, "version": version}
