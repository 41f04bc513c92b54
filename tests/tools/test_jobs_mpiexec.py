"""The command line of mpiexec, of both MPIs. No job is started."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainermn_tools.jobs import mpiexec

MPICH = {"path": "/opt/mpi ch/bin/mpiexec", "vendor": "MPICH"}
OPEN_MPI = {"path": "/opt/ompi/bin/mpiexec", "vendor": "Open MPI"}
NASTY = ["", "a b", "'", '"', "$(touch x)", "-n", "\\"]
any_word = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)
VARIABLES = ["PATH", "PYTHONPATH", "OMP_NUM_THREADS", "HOME"]
OPTIONS = ["-W", "error", "-m", "chainermn_tools.rank", "-m", "a.b"]
RANKS = ["-n", "2", sys.executable, *OPTIONS]


@pytest.mark.parametrize(
    ("launcher", "how", "options"),
    [
        (MPICH, {}, ""),
        (
            MPICH,
            {"prefix": True, "hosts": {"a": 1, "b": 1}},
            "-prepend-rank -hosts a:1,b:1",
        ),
        (OPEN_MPI, {"threads": 1}, "--map-by slot:OVERSUBSCRIBE"),
        # The user set OMP_NUM_THREADS.
        (OPEN_MPI, {}, "--map-by slot:OVERSUBSCRIBE --bind-to none"),
        (
            OPEN_MPI,
            {"prefix": True, "hosts": {"a": 2}, "threads": 1, "passed": ["OWN"]},
            "--map-by slot:OVERSUBSCRIBE --output tag --host a:2 -x CHAINERMN_LAUNCH "
            "-x OMP_NUM_THREADS -x OWN -x PYTHONPATH",
        ),
    ],
)
def test_command_lines(launcher, how, options):
    words = mpiexec.mpiexec_command(
        launcher, 2, ["-m", "a.b"], flags=["-W", "error"], variables=VARIABLES, **how
    )
    assert words == [launcher["path"], *options.split(), *RANKS]


@settings(max_examples=200)
@given(
    st.lists(any_word | st.sampled_from(NASTY) | st.from_regex(r"\A\\*:\Z"), min_size=1)
)
def test_arguments_stay_single_words_and_no_colon_ends_the_program(script):
    for launcher in (MPICH, OPEN_MPI):
        words = mpiexec.mpiexec_command(launcher, 2, script)
        mine = words[words.index(mpiexec.rank.__name__) + 1 :]
        assert ":" not in mine
        assert [mpiexec.rank.unescape(word) for word in mine] == script


HYDRA = "HYDRA build details:\n    Version:                                 4.2.0\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 2023"
RTE = "mpiexec (OpenRTE) 4.1.6\n\nReport bugs to http://www.open-mpi.org/"


@pytest.mark.parametrize(
    ("printed", "vendor", "version"),
    [
        (HYDRA, "MPICH", "4.2.0"),
        (RTE, "Open MPI", "4.1.6"),
        ("mpiexec (Open MPI) 5.0.11\n", "Open MPI", "5.0.11"),
        (INTEL, "Intel MPI", "2021.10"),
        (f"{HYDRA} Configure options: --prefix=/opt/mvapich2", "MVAPICH", "4.2.0"),
        ("prterun (PRRTE) 3.0.5", "Open MPI", "3.0.5"),
        ("slurm launcher", None, None),
    ],
)
def test_launchers_are_recognised(printed, vendor, version):
    assert mpiexec.parse_mpi_version(printed) == {"vendor": vendor, "version": version}
