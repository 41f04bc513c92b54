"""Scripts that lie in no package, as modules of this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
# What they import from their own folder, or one beside it, bears names that others may
# have, too.
FOLDERS = tuple(f"{ROOT / top}/" for top in ("benchmarks", "examples", "scripts"))


@contextmanager
def imported(script: Path) -> Iterator[Any]:
    """The script as a module; it and what it imported of its folder are forgotten afterwards."""
    modules = set(sys.modules)
    path = sys.path[:]
    sys.path.insert(0, str(script.parent))
    try:
        yield importlib.import_module(script.stem)
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(FOLDERS):
                del sys.modules[name]
