"""What is repaired in Chainer 7.8.1 as it is imported, and where.

A row changes lines of one module's source in memory, because the installed Python, NumPy
or setuptools breaks them, or because a fault of Chainer prevents a snapshot. No file is
written, and the compiled caches of these modules are neither read nor written. Every
change keeps the number of lines, so that tracebacks stay true.
"""

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source
from types import CodeType
from typing import NamedTuple


class Since(NamedTuple):
    """From when on a repair is needed, in words and as a question."""

    words: str
    is_broken: Callable[[], bool]


class Repair:
    """One row of the table."""

    def __init__(
        self, module: str, why: str, since: Since, *changes: tuple[str, str]
    ) -> None:
        """Each change is a text that occurs once in the source, and the text that replaces it."""
        self.module = module
        self.why = why
        self.since = since
        self.changes = changes


def numpy(major: int, minor: int) -> Since:
    def is_broken() -> bool:
        version = import_module("numpy").__version__.split(".")
        return (int(version[0]), int(version[1])) >= (major, minor)

    return Since(f"NumPy {major}.{minor}", is_broken)


def cannot_import(module: str, words: str) -> Since:
    def is_broken() -> bool:
        try:
            import_module(module)
        except Exception:
            # A half-working module may raise anything (old setuptools does).
            return True
        return False

    return Since(words, is_broken)


ALWAYS = Since("Chainer 7", lambda: True)
PKG_RESOURCES = (
    "pkg_resources is gone",
    cannot_import("pkg_resources", "setuptools 82, or none installed"),
    (
        "import pkg_resources\n",
        "import _chainermn_startup.requirements as pkg_resources\n",
    ),
)
PADDING = "numpy.array(self.padding).astype(y.dtype)[()]"

TABLE: tuple[Repair, ...] = (
    Repair(
        "chainer._environment_check",
        "numpy.distutils is gone; Chainer asks it on macOS only",
        cannot_import(
            "numpy.distutils.system_info", "Python 3.12; setuptools 75 with NumPy 1.26"
        ),
        ("import numpy.distutils.system_info\n", "import numpy\n"),
        ("if sys.platform != 'darwin':", "if True:  # numpy.distutils can't be asked"),
    ),
    Repair("chainer._environment_check", *PKG_RESOURCES),
    Repair("chainer.testing.helper", *PKG_RESOURCES),
    Repair("chainer.testing.doctest_helper", *PKG_RESOURCES),
    Repair(
        "chainer.functions.array.as_strided",
        "np.sctypes is gone",
        numpy(2, 0),
        ("np.sctypes['int']", "(np.int8, np.int16, np.int32, np.int64)"),
        ("np.sctypes['float']", "(np.float16, np.float32, np.float64, np.longdouble)"),
    ),
    Repair(
        "chainer.functions.array.resize_images",
        "numpy.float is gone",
        numpy(1, 24),
        (
            "linspace(0, H - 1, num=out_H, dtype=numpy.float)",
            "linspace(0, H - 1, num=out_H)",
        ),
        (
            "linspace(0, W - 1, num=out_W, dtype=numpy.float)",
            "linspace(0, W - 1, num=out_W)",
        ),
        ("arange(out_H, dtype=numpy.float) + 0.5", "arange(out_H, dtype=float) + 0.5"),
        ("arange(out_W, dtype=numpy.float) + 0.5", "arange(out_W, dtype=float) + 0.5"),
        (
            "arange(out_H, dtype=numpy.float) * y_scale",
            "arange(out_H, dtype=float) * y_scale",
        ),
        (
            "arange(out_W, dtype=numpy.float) * x_scale",
            "arange(out_W, dtype=float) * x_scale",
        ),
    ),
    Repair(
        "chainer.distributions.categorical",
        "meshgrid returns a tuple, no longer a list",
        numpy(2, 0),
        ("self.log_p[mg + [x.data.", "self.log_p[list(mg) + [x.data."),
        ("self.log_p[mg + [x.astype(", "self.log_p[list(mg) + [x.astype("),
    ),
    Repair(
        "chainer.reporter",
        "a float16 plus a Python float is a float16: sums are made float64",
        numpy(2, 0),
        (
            "            # ChainerX arrays does not support inplace assignment if it's\n"
            "            # connected to the backprop graph.\n"
            "            value = value.as_grad_stopped()\n"
            "\n"
            "        with chainer.using_device(backend.get_device_from_array(value)):\n",
            "            value = value.as_grad_stopped()\n"
            "        with chainer.using_device(backend.get_device_from_array(value)):\n"
            "            value, weight = (\n"
            "                v.astype(numpy.promote_types(v.dtype, numpy.float64))\n"
            "                if hasattr(v, 'astype') else v for v in (value, weight))\n",
        ),
    ),
    Repair(
        "chainer.functions.array.pad_sequence",
        "-1 no longer wraps around in an unsigned array",
        numpy(2, 0),
        ("y[i, l:] = self.padding", f"y[i, l:] = {PADDING}"),
        ("(ptrs, lengths, self.padding, base,", f"(ptrs, lengths, {PADDING}, base,"),
    ),
    Repair(
        "chainer.variable",
        "NumPy's arrays now have a `device`, which debug_print took for CuPy's",
        numpy(2, 0),
        (
            "device = getattr(array, 'device', 'CPU')",
            "device = 'CPU' if isinstance(array, numpy.ndarray) else array.device",
        ),
    ),
    Repair(
        "chainer.dataset.convert",
        "`out` as a positional argument is deprecated",
        numpy(2, 4),
        (
            "maximum(shape, array.shape, shape)",
            "maximum(shape, array.shape, out=shape)",
        ),
    ),
    Repair(
        "chainer.dataset.convert",
        "-1 no longer wraps around in an unsigned array",
        numpy(2, 0),
        (
            "full(shape, padding, dtype",
            "full(shape, numpy.array(padding).astype(arrays[0].dtype)[()], dtype",
        ),
    ),
    Repair(
        "chainer.functions.math.fix",
        "fix is deprecated",
        numpy(2, 5),
        ("xp.fix(x)", "xp.trunc(x)"),
    ),
    Repair(
        "chainer.iterators.multiprocess_iterator",
        "setDaemon is deprecated",
        ALWAYS,
        ("thread.setDaemon(True)", "thread.daemon = True"),
    ),
    Repair(
        "chainer.iterators.multiprocess_iterator",
        "with shuffle=False there is no order, which can't be copied for a snapshot",
        ALWAYS,
        (
            "        order = self._state.order.copy()\n"
            "        try:\n"
            "            serializer('order', order)\n"
            "        except KeyError:\n"
            "            serializer('_order', order)\n",
            "        order = self._state.order\n"
            "        if order is not None:  # else nothing is saved, as by SerialIterator\n"
            "            order = order.copy()\n"
            "            try: serializer('order', order)\n"
            "            except KeyError: serializer('_order', order)\n",
        ),
    ),
)


def repaired_spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """The spec of module `name` with a loader that repairs it; None if it needs no repair."""
    changes = [
        change
        for row in TABLE
        if row.module == name and row.since.is_broken()
        for change in row.changes
    ]
    if not changes:
        return None
    spec = PathFinder.find_spec(name, path)
    if spec is not None and isinstance(spec.loader, SourceFileLoader):
        spec.loader = RepairingLoader(name, spec.loader.path, changes)
    return spec


class RepairingLoader(SourceFileLoader):
    """Compiles a module's source with changes made to it."""

    def __init__(self, name: str, path: str, changes: list[tuple[str, str]]) -> None:
        super().__init__(name, path)
        self.changes = changes

    # Not source_to_code, which a compiled cache would bypass.
    def get_code(self, name: str) -> CodeType | None:
        source = decode_source(self.get_data(self.path))
        for old, new in self.changes:
            if source.count(old) != 1:
                warnings.warn(
                    f"{name} is not as in Chainer 7.8.1 ({old.strip()!r} stands in it "
                    f"{source.count(old)} times, not once): left as it is, though it may not work "
                    "on this Python and NumPy. CHAINERMN_NO_COMPAT=1 silences this.",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return super().get_code(name)
            source = source.replace(old, new)
        code: CodeType = self.source_to_code(source, self.path)
        return code
