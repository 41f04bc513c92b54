"""Notices when the interpreter is about to end because of `SystemExit`, and with which code.

Python calls no hook for this: `sys.exit(3)` reaches neither `sys.excepthook` nor, with its code,
`atexit`; wrapping it misses `raise SystemExit(3)`, and is fooled when the exception is caught. From
3.12 on `sys.monitoring` sees the exception leave the outermost frame. 3.11, which no longer
changes, reads the exception's `code`, a descriptor of ours, when no frame is left (see
docs/decisions/abort.md).
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

Listener = Callable[[object], None]  # is given SystemExit.code


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


if sys.version_info >= (3, 12):
    _tool: int | None = None

    def watch(listener: Listener) -> None:
        """Call `listener` when `SystemExit` leaves the main thread's outermost frame."""
        global _tool

        def unwound(code: types.CodeType, offset: int, exception: BaseException) -> None:
            if (
                isinstance(exception, SystemExit)
                and sys._getframe(1).f_back is None
                and _is_main_thread()
            ):
                listener(exception.code)

        monitoring = sys.monitoring
        free = (tool for tool in (4, 3, 5, 2, 1, 0) if monitoring.get_tool(tool) is None)
        _tool = next(free, None)
        if _tool is None:
            taken = "all tools of sys.monitoring are taken"
            what = f"{taken}: sys.exit(3) on one rank won't end the job"
            warnings.warn(what, RuntimeWarning, stacklevel=3)
            return
        monitoring.use_tool_id(_tool, "chainermn")
        monitoring.register_callback(_tool, monitoring.events.PY_UNWIND, unwound)
        monitoring.set_events(_tool, monitoring.events.PY_UNWIND)

    def unwatch() -> None:
        """Undo `watch`."""
        global _tool
        if _tool is not None:
            sys.monitoring.set_events(_tool, sys.monitoring.events.NO_EVENTS)
            sys.monitoring.register_callback(_tool, sys.monitoring.events.PY_UNWIND, None)
            sys.monitoring.free_tool_id(_tool)
            _tool = None

else:
    # The dict behind the read-only view that a built-in type shows.
    _members: dict[str, Any] = gc.get_referents(SystemExit.__dict__)[0]
    _code = _members["code"]

    def _replace_code(descriptor: object) -> None:
        _members["code"] = descriptor
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))

    _sys_exit = sys.exit

    def _exit(status: Any = None, /) -> NoReturn:
        """`sys.exit`, which alone would raise a bare number and no instance with a `code`."""
        try:
            _sys_exit(status)
        except SystemExit:  # makes an instance of it
            raise

    def watch(listener: Listener) -> None:
        """Call `listener` when the interpreter is about to end because of `SystemExit`."""

        def read_code(exception: SystemExit) -> object:
            code = _code.__get__(exception)
            # It isn't read by Python code, but by the interpreter itself.
            if sys._getframe().f_back is None and _is_main_thread():
                listener(code)
            return code

        _replace_code(property(read_code, _code.__set__, _code.__delete__))
        for module in list(sys.modules.values()):  # sys, and modules with `from sys import exit`
            if not isinstance(module, types.ModuleType) or module is sys.modules[__name__]:
                continue
            names = object.__getattribute__(module, "__dict__")  # loads no lazy module
            for name in [name for name, value in names.items() if value is _sys_exit]:
                names[name] = _exit

    def unwatch() -> None:
        """Undo `watch`."""
        _replace_code(_code)
        sys.exit = _sys_exit
