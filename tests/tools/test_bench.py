"""`chainermn bench`: its options, and real jobs that print and draw."""

import pytest

from tests.support.jobs import commands

QUICK = ("bench", "--communicator", "flat", "--max-size", "1K")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "0"], "0 is not in the range x>=1"),
        (["--communicator", "foo"], "'foo' is not one of 'naive', 'flat'"),
        (["--plot", "bench"], "bench must end in one of: "),
        (["--plot", "/nowhere/x.png"], "nothing can be written in /nowhere"),
    ],
)
def test_wrong_options_are_named_before_anything_is_started(arguments, said):
    done = commands.invoke("bench", *arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_inside_mpiexec_the_number_of_ranks_is_the_launchers():
    done = commands.invoke("bench", "-n", "2", PMI_RANK="0", PMI_SIZE="3")
    assert done.exit_code == 2
    assert "already started" in done.output


def test_in_a_launcher_of_another_mpi_one_line_says_so():
    # A child of this process may pass for one of a rank, since MPI may be loaded here.
    shell = "sh", "-c", '"$@"; exit $?', ""
    done = commands.run(
        *shell,
        *commands.MODULE,
        *QUICK,
        OMPI_COMM_WORLD_RANK="0",
        OMPI_COMM_WORLD_SIZE="2",
    )
    assert done.returncode == 1
    assert "\nError: a launcher started this as rank 0 of 2" in done.stderr


def test_a_communicator_that_cannot_be_measured_is_no_ranks_fault():
    done = commands.chainermn("bench", "--communicator", "dummy", "-n", 2)
    assert done.returncode == 1
    assert done.stdout.endswith("Nothing was measured.\n")
    assert "rank 0" not in done.stderr


def test_started_plainly_it_starts_ranks_and_shows_what_they_print(tmp_path):
    picture = tmp_path / "a picture.png"
    done = commands.chainermn(*QUICK, "-n", 2, "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks on 1 node")
    assert done.stdout.count("mean of gradients, flat") == 1
    assert done.stdout.count("plain MPI_Allreduce") == 1
    assert done.stdout.rstrip().endswith("All values were right.")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "mpiexec" not in done.stderr


def test_inside_mpiexec_it_measures_these_ranks():
    words = commands.BIN / "mpiexec", "-n", 1, *commands.MODULE, *QUICK
    done = commands.run(*words, "--plot", "/nowhere/bench.png")
    assert done.stdout.startswith("1 rank on 1 node")
    assert "All values were right." in done.stdout
    assert done.returncode == 2
    assert "/nowhere/bench.png can't be written: No such file" in done.stderr
