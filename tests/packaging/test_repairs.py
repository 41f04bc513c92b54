"""Chainer works on every supported Python and NumPy, and each repair is there for a reason."""

import json
import re
import shutil
from pathlib import Path

import chainer
import pytest

from _chainermn_startup import repairs
from tests.support.hosts.interpreters import found_combinations
from tests.support.plugins.pairwise import tiered

SCRIPT = Path(__file__).with_name("check_chainer.py")
Repair = repairs.Repair
TABLE = repairs.TABLE
CHECKS = re.findall(r"^def check_(\w+)", SCRIPT.read_text(), re.M)
# What fails without each row, on the newest Python and NumPy found here.
NEEDED = """
import import testing_requirements doctest_helper as_strided resize_images categorical
mean_of_float16 pad_sequence debug_print concat_examples_without_deprecation concat_examples
fix_without_deprecation multiprocess_iterator_without_deprecation
multiprocess_iterator_saved_without_an_order
"""
NEEDED_FOR = NEEDED.split()
ROWS = range(len(NEEDED_FOR))
full = pytest.mark.full


@pytest.fixture
def newest(environment, environment_on):
    """A copy, since what Python caches there without a repair is no test's but this one's."""
    return environment(of=environment_on(*found_combinations()[-1]))


def check(env, *arguments):
    return json.loads(env.run("-W", "ignore", SCRIPT, *arguments))


def test_chainer_works(combination, environment_on):
    found = check(environment_on(*combination), *CHECKS)
    assert found == dict.fromkeys(CHECKS)


@pytest.mark.parametrize(
    ("which", "version"),
    tiered([(0, "65.5.*"), (-1, "81.*")], (0, -1), ("65.5.*", "75.*", "81.*")),
)
def test_any_setuptools_may_be_there(which, version, environment, environment_on):
    """Some have a `pkg_resources` or `distutils` that fails halfway on some Python or NumPy."""
    env = environment(of=environment_on(*found_combinations()[which]))
    env.install(f"setuptools=={version}")
    env.run("-W", "ignore", "-c", "import chainer, chainer.testing")


def test_every_row_names_what_fails_without_it():
    assert len(NEEDED_FOR) == len(TABLE)
    assert set(NEEDED_FOR) <= set(CHECKS)


# Those that imports need, each alone; the others together, and in the full tier each
# alone, too.
ALONE = [
    pytest.param([row], marks=() if NEEDED_FOR[row] == "import" else full)
    for row in ROWS
]
TOGETHER = [row for row in ROWS if NEEDED_FOR[row] != "import"]


@pytest.mark.parametrize("rows", [*ALONE, TOGETHER], ids=str)
def test_each_repair_is_needed(newest, rows):
    """Left out where its table says that Chainer is broken, something fails."""
    asked = (
        "import json, _chainermn_startup.repairs as r;"
        f"print(json.dumps([r.TABLE[row].since.is_broken() for row in {rows}]))"
    )
    broken = json.loads(newest.run("-W", "ignore", "-c", asked))
    names = [NEEDED_FOR[row] for row in rows]
    without = ("--without", ",".join(map(str, rows)))
    found = check(newest, *without, *names)
    assert [found[name] is not None for name in names] == broken, found


def test_repairs_keep_line_numbers_and_say_why():
    for row in TABLE:
        assert row.why, row.module
        assert row.since.words, row.module
        for old, new in row.changes:
            assert old.count("\n") == new.count("\n"), row.module


def test_nothing_is_repaired_where_nothing_is_broken(monkeypatch):
    name = "chainer.iterators.multiprocess_iterator"
    path = chainer.iterators.__path__
    found = repairs.repaired_spec(name, path)  # broken on every Python
    assert found is not None
    assert isinstance(found.loader, repairs.RepairingLoader)
    never = repairs.Since("never", lambda: False)
    intact = tuple(Repair(row.module, row.why, never, *row.changes) for row in TABLE)
    monkeypatch.setattr(repairs, "TABLE", intact)
    assert repairs.repaired_spec(name, path) is None
    assert repairs.repaired_spec("chainer.links", chainer.__path__) is None


def test_source_that_does_not_match_is_left_alone_with_a_warning(newest, tmp_path):
    """Another Chainer: the module is imported as it stands, and the warning names it."""
    other = tmp_path / "chainer"
    shutil.copytree(newest.site_packages / "chainer", other)
    module = other / "iterators" / "multiprocess_iterator.py"
    module.write_text(
        module.read_text().replace("thread.setDaemon(True)", "pass  # another")
    )
    asked = (
        "import chainer, inspect; from chainer.iterators import multiprocess_iterator as m;"
        f"assert m.__file__ == {str(module)!r}; print(type(m.__loader__).__name__)"
    )
    path = {"PYTHONPATH": str(tmp_path)}
    told = newest.run("-c", asked, env=path)
    assert (
        "RuntimeWarning: chainer.iterators.multiprocess_iterator is not as in Chainer"
        in told
    )
    assert told.count("RuntimeWarning") == 1
    newest.run(
        "-W", "error::RuntimeWarning", "-c", "import chainer", env=path, ok=False
    )


def test_opting_out_leaves_chainer_alone(newest):
    newest.run("-c", "import chainer")
    without = {"CHAINERMN_NO_COMPAT": "1"}
    told = newest.run("-c", "import chainer", env=without, ok=False)
    assert "AttributeError: `np.sctypes` was removed" in told
    assert "_chainermn_" not in told
