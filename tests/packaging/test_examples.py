"""Every example runs with the distributions and what its README has pip install, and no more."""

import re
import shlex
import shutil

import pytest

from tests.support.jobs.scripts import ROOT

READMES = sorted((ROOT / "examples").glob("*/README.md"))
# Of each command, in place of whole runs.
SMALL = {
    "make_images.py": ("--train", "20", "--val", "5"),
    "train_seq2seq.py": ("--epoch", "1", "--examples", "200", "--tests", "10"),
    "train_seq2seq_model_parallel.py": (
        "--epoch",
        "1",
        "--examples",
        "200",
        "--tests",
        "10",
    ),
}


def commands(readme):
    """The commands of the blocks that are marked as run, in their order."""
    blocks = re.findall(r"<!-- run by: .*? -->\n\n((?:    .*\n)+)", readme)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.mark.full
@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.parent.name)
def test_an_example_runs_in_a_fresh_environment_as_its_readme_says(
    readme, environment, everything
):
    env = environment(of=everything)
    shutil.copytree(readme.parent, env.folder / "work")
    jobs = 0
    for command in commands(readme.read_text()):
        if command[:2] == ["pip", "install"]:
            env.install(*command[2:])
            continue
        ranks = 1
        if command[:2] == ["mpiexec", "-n"]:
            ranks = 2
            command = command[3:]
            jobs += 1
        assert command[0] == "python"
        script, *arguments = command[1:]
        small = SMALL.get(script, ("--epoch", "1"))
        out = env.run(script, *arguments, *small, ranks=ranks)
        assert "Warning" not in out
    assert jobs
    assert (env.folder / "work" / "result" / "log").is_file()
