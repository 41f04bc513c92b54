"""Imports inside of a package point one way: a folder imports only what stands below it.

And what a folder offers to others is what its ``__init__`` re-exports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
# Of each package its folders and modules, the highest first; those of one line may
# import each other. Of comm every one has a place; elsewhere what isn't named may
# import anything.
ORDER = {
    "comm": [
        "__init__",
        "creation sharding",
        "named_communicators",
        "mpi_communicator",
        "negotiation",
        "communicators communicator",
        "gradients",
        "gpu_sums",
        "sums",
        "faults",
        "trace",
        "messaging",
        "config resources",
        "watchdog",
        "gpu",
        "runtime reducer",
        "work signatures",
        "layout",
        "numbers call_place environment errors mpi_start observers topology",
    ],
    "train": [
        "__init__",
        "extensions",
        "checkpoint",
        "optimizers iterators datasets",
        "optimizer_state profiling random_states trainer_introspection",
        "slots",
        "background_thread collective_errors host_arrays leaving testing wrappers",
    ],
    "modelparallel": ["__init__", "links", "loss_scaling", "functions"],
    "tools": [
        "__init__ __main__",
        "cli",
        "doctor",
        "bench",
        "report",
        "launch live trace",
        "explain environment",
        "jobs",
        "formatting rank",
        "threads long_events",
    ],
}
COMPLETE = {"comm", "train", "modelparallel", "tools"}
# The packages whose folders are imported only by what their `__init__` re-exports.
RE_EXPORTING = ["comm", "train", "modelparallel", "tools"]
# Modules that are imported past their folder's `__init__`: it is for those who mustn't
# start MPI.
DIRECT = {
    "chainermn_comm.trace.tracer",
    # And for those who mustn't load NumPy.
    *(f"chainermn_tools.bench.{name}" for name in ["operations", "timing", "values"]),
    *(f"chainermn_tools.bench.{name}" for name in ["plot", "runner", "text"]),
}


def imports(package: str) -> Iterator[tuple[str, str, str]]:
    """Where an import stands, and the modules, below the package, that imports and is imported."""
    root = PACKAGES / f"chainermn-{package}" / "src" / f"chainermn_{package}"
    for path in root.rglob("*.py"):
        inner = path.relative_to(root).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(PACKAGES)}:{getattr(node, 'lineno', 0)}"
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = (
                    [root.name, *inner[: len(inner) - node.level]] if node.level else []
                )
                module = ".".join([*base, *filter(None, [node.module])])
                names = [f"{module}.{alias.name}" for alias in node.names]
            for name in names:
                if name.startswith(f"{root.name}."):
                    yield where, ".".join(inner), name.partition(".")[2]


@cache
def exports(package: str, folder: str) -> set[str] | None:
    """What a folder's `__init__` re-exports; None if it isn't a folder.

    Names ``x as x`` are for other folders, and those in ``__all__`` for users, too.
    """
    init = (
        PACKAGES / f"chainermn-{package}/src/chainermn_{package}/{folder}/__init__.py"
    )
    if not init.exists():
        return None
    body = ast.parse(init.read_text()).body
    public: set[str] = set()
    inner: set[str] = set()
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public = set(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom):
            inner |= {alias.name for alias in node.names if alias.asname == alias.name}
    return {"*", *public, *inner}


@pytest.mark.parametrize("package", ORDER)
def test_a_folder_imports_only_those_below_it(package):
    place = {name: n for n, line in enumerate(ORDER[package]) for name in line.split()}
    wrong = []
    for where, importing, imported in imports(package):
        above, below = importing.split(".")[0], imported.split(".")[0]
        if package in COMPLETE and not {above, below} <= place.keys():
            wrong.append(f"{where}: no place for {above} or {below}")
        elif above != below and place.get(above, -1) > place.get(below, len(place)):
            wrong.append(f"{where}: {above} imports {below}, which stands above it")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", RE_EXPORTING)
def test_a_folder_is_imported_by_what_it_re_exports(package):
    wrong = []
    for where, importing, imported in imports(package):
        folder, _, rest = imported.partition(".")
        offered = exports(package, folder)
        if folder == importing.split(".")[0] or offered is None or not rest:
            continue
        module = f"chainermn_{package}.{imported}"
        if rest not in offered and not {module, module.rpartition(".")[0]} & DIRECT:
            wrong.append(f"{where}: {imported} isn't re-exported by {folder}")
    assert not wrong, "\n".join(wrong)


# Of numbers and objects; at its first use on a communicator mpi4py duplicates that with
# the interpreter held, so that two threads of two ranks may wait for each other.
OBJECT_REDUCTION = re.compile(r"\.(?:allreduce|reduce|scan|exscan)\(.*\bMPI\.")


def test_no_package_reduces_objects_by_mpi():
    found = [
        f"{path.relative_to(PACKAGES)}:{number}"
        for path in sorted(PACKAGES.glob("*/src/**/*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OBJECT_REDUCTION.search(line)
    ]
    assert OBJECT_REDUCTION.search("everywhere = node.allreduce(found, MPI.LAND)")
    assert not found, "use allgather: " + ", ".join(found)
