"""The BLAS that NumPy computes with."""

from __future__ import annotations

import importlib
from typing import Any

from chainermn_tools.environment.probe import unavailable


def blas() -> dict[str, Any]:
    """What NumPy was built with and what it loaded. Call it in a child process."""
    import numpy

    built = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
    try:
        threadpoolctl = importlib.import_module("threadpoolctl")
    except ModuleNotFoundError:
        loaded: Any = unavailable("threadpoolctl is not installed")
    else:
        loaded = [
            {
                "library": one["internal_api"],
                "version": one["version"],
                "threads": one["num_threads"],
                "file": one["filepath"],
            }
            for one in threadpoolctl.threadpool_info()
            if one["user_api"] == "blas"
        ]
    return {"numpy built with": f"{built['name']} {built['version']}", "loaded": loaded}
