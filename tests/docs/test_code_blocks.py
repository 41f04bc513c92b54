"""Every block of code in the READMEs and the manual is run, or says why it isn't."""

import json
import re
import runpy
from collections import Counter
from itertools import pairwise
from pathlib import Path

import click
import numpy as np
import pytest
from chainer import Variable

from chainermn_tools import cli
from tests.support.jobs.commands import environment
from tests.support.jobs.runner import run_command

from .blocks import PAGES, ROOT, blocks

# What a page's blocks take for granted, by page.
GIVEN = Path(__file__).parent / "given"
SECONDS = 600.0  # ends what hangs
SHELL = ("bash", "sh", "shell", "console")

# How many blocks no test runs: installation, hosts, GPUs, Slurm. Each says why, before
# it.
NOT_RUN = {"README.md": 1, "docs": 19, "packages": 11}

# Pages whose commands start several jobs: the second tier runs them.
SEVERAL_JOBS = re.compile(r"docs/(checkpoints|index|tutorial)\.md")
# Pages whose commands start many, none of a kind that no other page has: the full tier
# runs them. What they have in Python for several ranks is run in earlier tiers, too: see
# below.
MANY_JOBS = re.compile(
    r"docs/(communicators|diagnosing|failures|inside|model-parallelism|moving|performance)\.md"
    r"|packages/chainermn-(modelparallel|tools)/README\.md"
)

ALL = {page: blocks(page) for page in PAGES}
EACH = [block for found in ALL.values() for block in found]


def is_run(block):
    """Whether it is run here."""
    return not block.note.keys() & {"not run", "run by"}


def run(folder, statuses, *command):
    """Run a command in `folder` to its end, and return what it printed."""
    job = run_command([*command], environment(MPLBACKEND="Agg"), SECONDS, cwd=folder)
    assert job.returncode in statuses, f"{command}: {job}"
    return job.out + job.err


def shell(folder, block):
    """Run a block's commands; one of a console also shows what they print.

    There `...` is anything, and a number with a decimal point any such number.
    """

    def bash(text):
        return run(
            folder,
            block.statuses,
            "bash",
            "-euo",
            "pipefail",
            "-c",
            f"exec 2>&1\n{text}",
        )

    if block.language != "console":
        bash(block.text)
        return
    for command, shown in re.findall(
        r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", block.text, re.M
    ):
        # Open MPI's launcher prints a NUL.
        out = re.sub(r"\x1b\[\w|\0", "", bash(command))
        assert re.search(pattern(shown), out), (
            f"{block} shows\n{shown}\nbut it is\n{out}"
        )


def pattern(shown):
    anything = (r"\.\.\.", r"[\s\S]*?"), (r"\d+\.\d+", r"\d+\.\d+"), (r"\s+", r"\s+")

    def of(word):
        return next(
            (any_ for one, any_ in anything if re.fullmatch(one, word)), re.escape(word)
        )

    return "".join(map(of, re.split(r"(\.\.\.|\b\d+\.\d+\b|\s+)", shown.strip())))


def change(folder, block):
    """Apply a diff: what a hunk takes for there must be there, once."""
    file = folder / block.title
    text = file.read_text()
    for hunk in re.split(r"^@@.*\n", block.text, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] or "\n" for line in lines if line[0] != "+")
        new = "".join(line[1:] or "\n" for line in lines if line[0] != "-")
        times = text.count(old)
        assert times == 1, f"{block}: {file.name} has {times} times\n{old}"
        text = text.replace(old, new)
    file.write_text(text)


def perform(folder, block, scripts):
    """Do with a block what its language asks for; Python without a title is collected."""
    if "of" in block.note:
        assert block.text in (ROOT / block.note["of"]).read_text(), (
            f"{block}: is no part of it"
        )
    elif block.language == "python" and not block.title:
        scripts[block.ranks] = scripts.get(block.ranks, "") + block.text
    elif block.language == "diff":
        change(folder, block)
    elif block.language in SHELL:
        shell(folder, block)
    elif block.language == "json":
        json.loads(block.text)
    else:
        assert block.title, f"{block}: nobody knows how to run {block.language!r}"
        (folder / block.title).write_text(block.text)


def given(page):
    """What comes before the page's Python, and the files that its blocks take for granted."""
    files = sorted((GIVEN / page.removesuffix(".md").replace("/", "-")).glob("*.py"))
    before = [file.read_text() for file in files if file.name == "before.py"]
    return "".join(before), [file for file in files if file.name != "before.py"]


def tier_of(page):
    """The mark of the page's tier, if it isn't the first."""
    if MANY_JOBS.fullmatch(page):
        return [pytest.mark.full]
    if SEVERAL_JOBS.fullmatch(page):
        return [pytest.mark.ci]
    return []


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=tier_of(page))
        for page, found in ALL.items()
        if any(map(is_run, found))
    ],
)
def test_blocks_of_a_page_do_what_they_say(page, tmp_path):
    before, files = given(page)
    for file in files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    scripts = {}
    for block in filter(is_run, ALL[page]):
        perform(tmp_path, block, scripts)
    for ranks, text in scripts.items():
        script = tmp_path / f"page_on_{ranks}.py"
        script.write_text(before + text)
        launcher = ()
        if ranks > 1:
            launcher = ("mpiexec", "-n", str(ranks))
        run(tmp_path, [0], *launcher, "python", script.name)


# The Python of each page that runs on so many ranks.
ON_SEVERAL = {}
for one in filter(is_run, EACH):
    if one.ranks > 1:
        key = one.page, one.ranks
        ON_SEVERAL[key] = ON_SEVERAL.get(key, "") + one.text


def parameters_below(variable):
    """What a variable was computed from, as far as this rank knows."""
    functions = [variable.creator_node]
    while functions:
        for node in functions.pop().inputs:
            if node.creator_node is not None:
                functions.append(node.creator_node)
            elif (found := node.get_variable_or_none()) is not None:
                yield found


@pytest.fixture
def finite_gradients(monkeypatch):
    """Backward fails where it adds to the NaN that a new link has for gradients."""
    real = Variable.backward

    def backward(variable, *args, **kwargs):
        below = [*parameters_below(variable)]
        real(variable, *args, **kwargs)
        grads = [each.grad for each in below if each.grad is not None]
        for grad in grads:
            assert np.isfinite(grad).all(), "no cleargrads()"

    monkeypatch.setattr(Variable, "backward", backward)


@pytest.mark.world
@pytest.mark.usefixtures("finite_gradients")
@pytest.mark.parametrize(
    ("page", "text"),
    [
        pytest.param(page, text, id=page, marks=pytest.mark.sizes(ranks))
        for (page, ranks), text in ON_SEVERAL.items()
    ],
)
def test_python_for_several_ranks_runs(page, text, world, tmp_path, monkeypatch):
    """In this world, which needs no job of its own."""
    monkeypatch.chdir(world.bcast(tmp_path))
    script = tmp_path / "page.py"
    script.write_text(given(page)[0] + text)
    assert runpy.run_path(str(script), run_name="__main__")


def test_blocks_that_no_test_runs_are_known():
    skipped = [block for block in EACH if "not run" in block.note]
    counted = Counter(block.page.split("/")[0] for block in skipped)
    reasons = "\n".join(f"{block}: {block.note['not run']}" for block in skipped)
    assert dict(counted) == NOT_RUN, (
        f"change NOT_RUN if these are rightly not run:\n{reasons}"
    )


def test_tests_that_are_said_to_run_a_block_exist():
    named = [block.note["run by"] for block in EACH if "run by" in block.note]
    assert named
    found = [name for name in named if not (ROOT / name).is_file()]
    assert found == []


def uses_of_the_command():
    """Each one in a block for the shell, run or not, as words."""
    begins = re.compile(r"\s*(?:\$ )?(?:mpiexec (?:-\w+ \S+ )*)?chainermn (.*)")
    for block in EACH:
        if block.language in SHELL:
            for line in block.text.replace("\\\n", " ").split("\n"):
                line = re.sub(r"(^|\s)#.*", "", line)
                uses = map(begins.match, re.split(r"[|;&]+", line))
                yield from ((block, use[1].split()) for use in uses if use)


def test_options_of_the_command_exist():
    uses = list(uses_of_the_command())
    assert uses
    context = click.Context(cli.commands)
    for block, words in uses:
        command = cli.commands.get_command(context, words[0])
        assert command is not None, f"{block}: there is no chainermn {words[0]}"
        known = {name for parameter in command.params for name in parameter.opts} | {
            "--help"
        }
        for before, word in pairwise(words):
            if word.endswith(".py") or word == "--" or before == "-m":
                break  # what follows is the script's
            option = word.split("=")[0]
            assert not word.startswith("-") or option in known, f"{block}: {word}"
