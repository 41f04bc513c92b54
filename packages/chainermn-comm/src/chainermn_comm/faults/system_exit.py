"""Notices when the interpreter is about to end because of `SystemExit`, and with which code.

Python calls no hook in this case. Wrapping `sys.exit` would miss `raise SystemExit(3)`,
and misjudge an exception that is caught. From 3.12 on `sys.monitoring` reports when the
exception leaves the outermost frame. Python 3.11, which no longer changes, reads the
attribute `code`, a descriptor of ours, when no frame is left (see
docs/decisions/failures.md).
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

Listener = Callable[[object], None]  # called with SystemExit.code


def watch(listener: Listener) -> None:
    """Call `listener`, and no earlier listener, when `SystemExit` is about to end Python."""
    global _listener
    if _listener is None:
        _install()
    _listener = listener


def _notify(code: object) -> None:
    if _listener is not None and threading.get_ident() == threading.main_thread().ident:
        _listener(code)


_listener: Listener | None = None

if sys.version_info >= (3, 12):

    def _install() -> None:
        def unwound(
            code: types.CodeType, offset: int, exception: BaseException
        ) -> None:
            if isinstance(exception, SystemExit) and sys._getframe(1).f_back is None:
                _notify(exception.code)

        monitoring = sys.monitoring
        # The last identifiers belong to debuggers, profilers and coverage.
        tools = (4, 3, 5, 2, 1, 0)
        tool = next((one for one in tools if not monitoring.get_tool(one)), 4)
        monitoring.use_tool_id(tool, "chainermn")
        monitoring.register_callback(tool, monitoring.events.PY_UNWIND, unwound)
        monitoring.set_events(tool, monitoring.events.PY_UNWIND)

else:

    def _install() -> None:
        # The dict behind the read-only view that a built-in type shows.
        members: dict[str, Any] = gc.get_referents(SystemExit.__dict__)[0]
        descriptor = members["code"]

        def read_code(exception: SystemExit) -> object:
            code = descriptor.__get__(exception)
            # Without a caller, it is the interpreter that reads the code, to exit.
            if sys._getframe().f_back is None:
                _notify(code)
            return code

        members["code"] = property(read_code, descriptor.__set__, descriptor.__delete__)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
        original = sys.exit

        def exit_by_instance(status: Any = None, /) -> NoReturn:
            """Do as `sys.exit`, but raise an instance with a `code` instead of a bare number."""
            try:
                original(status)
            except SystemExit:  # makes an instance of it
                raise

        # This finds `sys` itself, and modules with `from sys import exit`.
        for module in list(sys.modules.values()):
            if isinstance(module, types.ModuleType):
                # Loads no lazy module.
                names = object.__getattribute__(module, "__dict__")
                for name in [name for name, it in names.items() if it is original]:
                    names[name] = exit_by_instance
