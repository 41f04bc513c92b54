"""Makes `import chainermn` find this project and `import chainer` work; does nothing else.

`chainermn.pth` runs `register` in every interpreter of an environment that holds
chainermn-comm. It puts one finder before the others, which answers for two names only:

- `chainermn` is the meta-package's facade, where that is installed, although Chainer
  ships a folder of that name (CHAINERMN_USE_BUNDLED=1 gives Chainer's);
- the modules of `chainer` that break on newer Python, NumPy or setuptools are repaired
  in memory, from the table in `repairs` (CHAINERMN_NO_COMPAT=1 leaves them alone).

It opens no connection, starts no process, and writes no file.
"""

import os
import sys

TYPE_CHECKING = False  # importing `typing` for it would slow every interpreter's start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class Finder:
    """The entry of `sys.meta_path`."""

    @staticmethod
    def find_spec(
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        if name == "chainermn" and os.environ.get("CHAINERMN_USE_BUNDLED") != "1":
            return facade_spec()
        if name.startswith("chainer.") and os.environ.get("CHAINERMN_NO_COMPAT") != "1":
            from . import repairs

            return repairs.repaired_spec(name, path)
        return None  # the next finder is asked


def facade_spec() -> "ModuleSpec | None":
    """The spec of `chainermn`, the folder `chainermn_facade`; None if it isn't installed."""
    from importlib.util import find_spec, spec_from_file_location

    facade = find_spec("chainermn_facade")
    if facade is None or facade.origin is None:
        return None
    return spec_from_file_location(
        "chainermn",
        facade.origin,
        submodule_search_locations=facade.submodule_search_locations,
    )


def register() -> None:
    """Put the finder first, once."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
