"""A release moves everything at once, and what is built of it serves a newcomer's first script."""

import re
import shutil

import pytest

from tests.support.jobs.scripts import ROOT, imported

SCRIPT = ROOT / "scripts" / "release.py"
UNRELEASED = "## {} (not released yet)\n\n- Something changed.\n\n"
FOLDERS = (
    ".",
    *(f"packages/chainermn-{p}" for p in ("comm", "train", "modelparallel", "tools")),
)
# What the README's lines leave out.
BEFORE = """\
import numpy as np
import chainer
import chainer.links as L
from chainer.training import extensions
MLP = lambda: L.Linear(4, 3)
def load():
    random = np.random.RandomState(0)
    x, y = random.rand(80, 4).astype("f"), random.randint(0, 3, 80).astype("i")
    data = chainer.datasets.TupleDataset(x, y)
    return chainer.datasets.split_dataset(data, 60)
"""
AFTER = """
updater = chainer.training.StandardUpdater(train_iter, optimizer)
chainer.training.Trainer(updater, (2, "epoch"), out="result").run()
print("rank", comm.rank, "of", comm.size, "learned from", len(train))
"""


@pytest.fixture
def script():
    with imported(SCRIPT) as module:
        yield module


@pytest.fixture
def tree(tmp_path):
    """The files that a release changes."""
    for folder in FOLDERS:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / folder / "pyproject.toml", tmp_path / folder)
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n" + UNRELEASED.format("7.8.9")
    )
    return tmp_path


def texts(tree):
    return {str(file): file.read_text() for file in tree.rglob("*") if file.is_file()}


def test_versions_pins_and_the_changelog_move_together_and_nothing_else(script, tree):
    before = texts(tree)
    script.release(tree, "7.8.9", "2030-01-02")
    for folder in FOLDERS:
        project = (tree / folder / "pyproject.toml").read_text()
        assert re.search(r'^version = "(.*)"$', project, re.M)[1] == "7.8.9"
        pins = re.findall(r'"chainermn-\w+~=([^"]*)"', project)
        assert set(pins) <= {"7.8"}
        assert bool(pins) == (folder != "packages/chainermn-comm")
    assert "## 7.8.9 (2030-01-02)" in (tree / "CHANGELOG.md").read_text()
    assert "not released yet" not in (tree / "CHANGELOG.md").read_text()
    for file, text in texts(tree).items():
        pairs = zip(before[file].splitlines(), text.splitlines(), strict=True)
        changed = [line for line, other in pairs if line != other]
        assert 1 <= len(changed) <= 5
        for line in changed:
            assert re.search(r"version|~=|^## ", line)


@pytest.mark.parametrize(
    ("version", "told"),
    [("7.9", "three numbers"), ("v7.9.0", "three"), ("7.9.0", "begin .*CHANGELOG.md")],
)
def test_what_can_not_be_released_changes_nothing(script, tree, version, told):
    script.release(tree, "7.8.9", "2030-01-02")
    before = texts(tree)
    with pytest.raises(ValueError, match=told):
        script.release(tree, version, "2030-02-03")
    assert texts(tree) == before


def test_what_is_built_runs_the_readmes_script(everything, tmp_path):
    """Installed by name, in an environment of nothing else, from the folder they are built to."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line[1:] for line in diff.splitlines() if line[:1] in " +" or not line]
    script = tmp_path / "your_script.py"
    script.write_text(BEFORE + "\n".join(lines) + AFTER)
    said = everything.run(script, ranks=2, env={"OMP_NUM_THREADS": "1"})
    assert "rank 0 of 2 learned from 30" in said
    assert "rank 1 of 2 learned from 30" in said
