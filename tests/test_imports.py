"""A folder's modules are imported by one another alone, and no package reduces objects by MPI.

`lint-imports` holds the order of folders, which pyproject.toml has; and mypy refuses names
that a folder doesn't re-export.
"""

from __future__ import annotations

import re
from pathlib import Path

import grimp  # type: ignore[import-untyped]
import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
# Modules that other folders import: whole ones that a folder re-exports, one for those who
# mustn't start MPI, and those for who mustn't load NumPy.
OFFERED = {
    *("comm.gpu.devices", "comm.gpu.kernels", "comm.gpu.nccl", "comm.gpu.staging"),
    *("comm.messaging.collectives", "comm.messaging.messages"),
    "comm.messaging.point_to_point",
    "train.iterators.epoch_positions",
    "comm.trace.tracer",
    *("tools.bench.plot", "tools.bench.runner", "tools.bench.table"),
}


@pytest.mark.parametrize("package", ["comm", "train", "modelparallel", "tools"])
def test_other_folders_import_what_a_folder_offers(package):
    graph = grimp.build_graph(f"chainermn_{package}", cache_dir=None)
    wrong = []
    for importing in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importing):
            _, *inner = imported.split(".")
            folder = f"chainermn_{package}.{'.'.join(inner[:1])}"
            is_inside = len(inner) > 1 and not f"{importing}.".startswith(f"{folder}.")
            offered = imported.removeprefix("chainermn_") in OFFERED
            if not inner or (is_inside and not offered):
                wrong.append(f"{importing} imports {imported}")
    assert len(graph.modules) > 10
    assert not wrong, "\n".join(sorted(wrong))


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
