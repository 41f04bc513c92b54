"""What the tests themselves must keep to; each broken rule is named with its file and line."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.support.jobs import runner

TESTS = Path(__file__).parent
FILES = sorted(path for path in TESTS.rglob("*.py") if "given" not in path.parts)
# What a test may import of ours: the names of `docs/api`, and the command.
PUBLIC = {
    "chainermn_comm": {"abort"},  # abort.add_hook
    "chainermn_train": {"extensions"},
    "chainermn_train.extensions": set(),
    "chainermn_modelparallel": set(),
    "chainermn_tools": {"cli"},
    "chainermn_tools.cli": set(),
    "chainermn_comm.faults.abort": set(),
}
OURS = (
    "chainermn_comm",
    "chainermn_train",
    "chainermn_modelparallel",
    "chainermn_tools",
)
SOURCES = {
    ".".join(path.relative_to(TESTS.parent).with_suffix("").parts[3:]).removesuffix(
        ".__init__"
    ): path
    for path in TESTS.parent.glob("packages/*/src/**/*.py")
}
MODULES = SOURCES.keys()
# In a script's text.
IMPORTS = re.compile(r"^[ \t]*((?:from|import) chainermn_\w.*)", re.M)
# They take a module's name as text.
NAMING = ("import_module", "setattr", "patch", "patch.object", "patch.dict", "getattr")
# Tests of several subjects on GPUs.
ON_DEVICES = "gpu"
# They read clocks: the adapters, the program of chaos, the promises of time, and skewed
# clocks.
CLOCKS = {"support", "chaos", "test_promises_of_time.py", "test_trace_of_jobs.py"}
CLOCK = re.compile(
    r"\btime\.(?:time|monotonic|perf_counter|process_time)(?:_ns)?(?![\"\w])"
    r"|(?:from|import) (?:time|timeit) (?:import|as)|import timeit"
)


@cache
def trees():
    return [(path.relative_to(TESTS), ast.parse(path.read_text())) for path in FILES]


def internals(tree):
    """Line and name of each module of ours that is used and isn't public; scripts in texts, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for line in IMPORTS.findall(node.value):
                yield from (
                    (node.lineno, name) for _, name in internals(ast.parse(line))
                )
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in MODULES:
            names = [ast.unparse(node)]  # of a package that was imported
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in inner if name in MODULES]
            if len(modules) == len(inner):
                names = modules
            else:
                names = [node.module, *modules]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(NAMING):
            first = None
            if node.args:
                first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                names = [first.value]
        for name in names:
            parent, _, last = name.rpartition(".")
            public = (
                name in PUBLIC
                or last in PUBLIC.get(parent, ())
                or (last[:1].isupper() and (parent in PUBLIC or parent in OURS))
            )
            if name.split(".")[0] in OURS and not public:
                yield node.lineno, name


def is_held_to_public_names(path):
    """Whether it has tests. What these share, in support or beside them, may look inside."""
    return path.name.startswith(("test_", "conftest"))


def is_inside_of(path, module):
    """Whether this is the module's file: named after its last components, in a folder of its."""
    parts = module.split(".")
    stem = path.stem.removeprefix("test_")
    folders = {ON_DEVICES, *parts, parts[0].removeprefix("chainermn_")}
    named = stem in {"_".join(parts[-count:]) for count in (1, 2, 3)}
    return named and folders.issuperset(path.parts[:-1])


def test_insides_are_imported_by_the_file_of_their_name_or_by_helpers():
    wrong = [
        f"{path}:{line}: {module}"
        for path, tree in trees()
        if is_held_to_public_names(path)
        for line, module in internals(tree)
        if not is_inside_of(path, module)
    ]
    assert not wrong, "\n".join(wrong)


def test_clocks_are_read_by_helpers_and_the_promises_of_time_alone():
    wrong = [
        f"{path}:{number}: {line.strip()}"
        for path in (path.relative_to(TESTS) for path in FILES)
        if not CLOCKS.intersection(path.parts)
        and path.name != Path(__file__).name
        and path.name.startswith("test_")
        for number, line in enumerate((TESTS / path).read_text().splitlines(), 1)
        if CLOCK.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_function_is_written_twice():
    """What two files need lies in support, once; a line may be alike by chance."""
    where = {}
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                long = 60
                if node.name.startswith("test_"):
                    long = 200
                body = "".join(map(ast.unparse, node.body))
                if len(body) > long:
                    where.setdefault(body, []).append(
                        f"{path}:{node.lineno}: {node.name}"
                    )
    wrong = [" = ".join(places) for places in where.values() if len(places) > 1]
    assert not wrong, "\n".join(wrong)


INNER = """
import pytest, numpy as np
def test_asserts(): assert 1
def test_raises():
    with pytest.raises(ValueError): int("x")
def test_compares(): np.testing.assert_array_equal([1], [1])
def test_checks_nothing():
    for x in []: assert x
def test_makes_a_check_and_does_not_use_it(): pytest.raises(ValueError)
@pytest.fixture
def checked(): assert 1
def test_leaves_checks_to_its_fixture(checked): pass
def test_fails(): assert 0
@pytest.mark.skip
def test_is_skipped(): pass
"""


def test_a_test_that_checks_nothing_fails(pytester, monkeypatch):
    """This is how executions that assert nothing are kept out of every run."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    pytester.makeconftest(
        "from tests.support.plugins import checks\nchecks.install()\n"
        "def pytest_configure(config): config.pluginmanager.register(checks.Plugin(False))\n"
    )
    pytester.makepyfile(INNER)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, failed=4, skipped=1)
    assert "nothing was checked" in result.stdout.str()


IN_A_WORLD = """
import pytest
in_a_world = pytest.mark.world
@in_a_world
def test_one_rank_checks(world):
    if world.rank: assert 1
@in_a_world
def test_no_rank_checks(world): pass
@in_a_world
def test_one_rank_fails(world): assert world.rank == 0
"""


def test_a_world_test_that_checks_nothing_on_any_rank_fails(
    pytester,
):
    """Rank 0 reports what all ranks did."""
    pytester.makeconftest("from tests.conftest import *")
    path = pytester.makepyfile(IN_A_WORLD)
    job = runner.run(2, "-m", "pytest", "--world", "-v", "-p", "no:cacheprovider", path)
    assert job.returncode == 1, job
    outcomes = dict(re.findall(r"::(test_\w+) (PASSED|FAILED)", job.out))
    assert outcomes == {
        "test_one_rank_checks": "PASSED",
        "test_no_rank_checks": "FAILED",
        "test_one_rank_fails": "FAILED",
    }, job
    assert "nothing was checked" in job.out
