"""Makes the modules of the table when they are imported."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

from . import _table
from ._table import CLASSES, LEFT_OUT, SOURCES


class Modules(InspectLoader):
    """Finds the modules of the table, and loads them."""

    @classmethod
    def find_spec(
        cls,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        own = name.removeprefix("chainermn.")
        if own == name:
            return None
        if own in LEFT_OUT:
            raise ImportError(f"{name} is left out: {LEFT_OUT[own]}", name=name)
        if own not in SOURCES:
            return None
        return spec_from_loader(name, cls(), origin=_table.__file__)

    def is_package(self, fullname: str) -> bool:
        return any(_children(fullname.removeprefix("chainermn.")))

    def get_source(self, fullname: str) -> str:
        return SOURCES[fullname.removeprefix("chainermn.")]

    def exec_module(self, module: ModuleType) -> None:
        own = module.__name__.removeprefix("chainermn.")
        if own in CLASSES:
            module.__all__ = [CLASSES[own]]  # type: ignore[attr-defined]
            module.__getattr__ = looking_up(module.__name__, CLASSES[own])  # type: ignore[method-assign]
            return
        names = dict[str, object]()
        code = self.get_code(module.__name__)
        assert code is not None
        exec(code, names)
        given = [name for name in names if not name.startswith("__")]
        public = [name for name in given if not name.startswith("_")]
        for child in _children(own):
            # An import of it later would put the module in the name's place.
            if child in public:
                import_module(f"{module.__name__}.{child}")
        vars(module).update({name: names[name] for name in given})
        module.__all__ = sorted(public)  # type: ignore[attr-defined]
        if self.is_package(module.__name__):
            module.__getattr__ = importing(module.__name__, *_children(own))  # type: ignore[method-assign]


def _children(parent: str) -> list[str]:
    prefix = parent + "."
    paths = [*SOURCES, *LEFT_OUT]
    return [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]


def importing(package: str, *children: str) -> Callable[[str], ModuleType]:
    """Return a package's ``__getattr__``, which imports these modules when they are asked for."""

    def __getattr__(name: str) -> ModuleType:
        if name in children:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__


def looking_up(module: str, class_name: str) -> Callable[[str], object]:
    """Return a module's ``__getattr__``, which imports its class when that is asked for."""

    def __getattr__(name: str) -> object:
        if name == class_name:
            return getattr(import_module("chainermn_comm.named_communicators"), name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


sys.meta_path.append(Modules)
