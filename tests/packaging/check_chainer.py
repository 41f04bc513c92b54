"""Calls what the repairs are for; prints one JSON object, check to traceback or null.

Run in an environment with Chainer: `python check_chainer.py [--without ROWS] CHECK...`,
where ROWS are numbers of rows of the table of repairs that are to be left out.
"""

import importlib
import json
import pkgutil
import sys
import traceback
import warnings

import numpy as np
from numpy.random import RandomState
from numpy.testing import assert_allclose

# What reads and writes Caffe's models was generated for a protobuf before 4.
NEED_OLD_PROTOBUF = ("chainer.exporters", "chainer.links.caffe")
# Some of `chainer.testing` needs it.
NO_PYTEST = "No module named 'pytest'"


def check_import():
    import chainer

    assert chainer.__version__ == "7.8.1"


def check_every_module():
    """But for those that need what is not installed."""
    import chainer

    failed = {}

    def import_one(name):
        try:
            importlib.import_module(name)
        except Exception:
            failed[name] = traceback.format_exc()

    modules = pkgutil.walk_packages(
        chainer.__path__, "chainer.", onerror=lambda name: None
    )
    for _, name, _ in modules:
        import_one(name)
    left = failed.keys() - NEED_OLD_PROTOBUF
    wrong = [failed[name] for name in sorted(left) if NO_PYTEST not in failed[name]]
    assert not wrong, "\n".join(wrong)


def check_environment_check_names_a_conflict():
    """Chainer's question about optional packages still works: here, about one that is there."""
    import chainer
    from chainer import _environment_check

    seen = []
    for package, specifier in (
        ("six", ">=1.0"),
        ("six", ">=999"),
        ("no-such-package", ">=1"),
    ):
        row = {"name": "X", "packages": [package], "specifier": specifier, "help": ""}
        vars(vars(chainer)["_version"])["_optional_dependencies"][:] = [row]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _environment_check.check()
        seen.append([str(w.message) for w in caught])
    assert seen[0] == seen[2] == []
    (told,) = seen[1]
    assert "may not be compatible" in told


def check_testing_requirements():
    from chainer import testing

    def is_skipped(decorator):
        return getattr(decorator(lambda: 1), "__unittest_skip__", False)

    needs = testing.with_requires
    needs_no = testing.without_requires
    assert not is_skipped(needs("numpy>=1.10,<99", "six"))
    assert is_skipped(needs("numpy<1.10"))
    assert not is_skipped(needs("no-such-package; python_version<'3'"))
    assert is_skipped(needs("numpy", "no-such-package"))
    assert not is_skipped(needs_no("no-such-package"))
    assert is_skipped(needs_no("numpy>=1.10"))


def check_doctest_helper():
    from chainer.testing import doctest_helper

    assert doctest_helper.skipif_requires_satisfied("six")
    assert not doctest_helper.skipif_requires_satisfied("six>=999")


def check_as_strided():
    from chainer import Variable
    from chainer import functions as F

    for dtype in (np.float16, np.float32, np.float64):
        x = Variable(np.arange(4, dtype=dtype))
        y = F.as_strided(x, (3, 2), (1, 1), 0)
        assert y.array.tolist() == [[0, 1], [1, 2], [2, 3]]
        y.grad = np.ones((3, 2), dtype)
        y.backward()
        assert x.grad.tolist() == [1, 2, 2, 1]


def check_resize_images():
    from chainer import functions as F

    x = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    wanted = {
        "bilinear": [[0, 0.5, 1], [1, 1.5, 2], [2, 2.5, 3]],
        "nearest": [[0, 0, 1], [0, 0, 1], [2, 2, 3]],
    }
    for mode, image in wanted.items():
        for align_corners in (True, False):
            y = F.resize_images(x, (3, 3), mode=mode, align_corners=align_corners)
            assert_allclose(y.array[0, 0], image, atol=1e-6)


def check_categorical():
    from chainer import Variable
    from chainer.distributions import Categorical

    p = np.array([[0.2, 0.8], [0.5, 0.5]], np.float32)
    for x in (np.array([1, 0]), Variable(np.array([1, 0]))):
        log_prob = Categorical(p=p).log_prob(x).array
        assert_allclose(log_prob, np.log([0.8, 0.5]), rtol=1e-5)


def check_mean_of_float16():
    from chainer import DictSummary
    from chainer.reporter import Summary

    values = RandomState(0).uniform(2.0, 3.0, 20_000).astype(np.float16)
    expected = values.astype(np.float64)
    half = np.float16(0.5)
    summary = DictSummary()
    for value in values:
        summary.add({"x": value, "zero-d": np.asarray(value), "weighed": (value, half)})
    found = summary.make_statistics()
    for name in ("x", "zero-d", "weighed"):
        assert_allclose(found[name], expected.mean(), rtol=1e-9)
    assert_allclose(found["x.std"], expected.std(), rtol=1e-6)
    integers = Summary()
    for number in (3, np.int8(100), np.int8(100)):
        integers.add(number)
    assert integers.compute_mean() == 203 / 3


def pads(pad):
    for dtype, last in ((np.uint8, 255), (np.int32, -1), (np.float32, -1)):
        given = [np.arange(2, dtype=dtype), np.arange(3, dtype=dtype)]
        rows = pad(given, padding=-1)
        assert rows.dtype == dtype
        assert rows.tolist() == [[0, 1, last], [0, 1, 2]]


def check_pad_sequence():
    from chainer import functions as F

    def pad(rows, padding):
        return F.pad_sequence(rows, padding=padding).array

    pads(pad)


def check_concat_examples():
    from chainer.dataset import concat_examples

    pads(concat_examples)


def check_concat_examples_without_deprecation():
    from chainer.dataset import concat_examples

    found = concat_examples([np.arange(1), np.arange(2)], padding=0).tolist()
    assert found == [
        [0, 0],
        [0, 1],
    ]


def check_debug_print():
    from chainer import Variable

    assert "- device: CPU\n" in Variable(np.zeros(2, np.float32)).debug_print()


def check_fix_without_deprecation():
    from chainer import functions as F

    numbers = np.array([-1.5, 1.5, 2], np.float16)
    found = F.fix(numbers).array.tolist()
    assert found == [-1, 1, 2]


def check_multiprocess_iterator_without_deprecation():
    from chainer.iterators import MultiprocessIterator

    with MultiprocessIterator(
        list(range(4)), 2, n_processes=1, shared_mem=100
    ) as iterator:
        found = sorted(iterator.next() + iterator.next())
        assert found == [0, 1, 2, 3]


def check_multiprocess_iterator_saved_without_an_order():
    """One that doesn't shuffle goes on after a snapshot with the batches to come."""
    import io

    from chainer.iterators import MultiprocessIterator
    from chainer.serializers import load_npz, save_npz

    def make():
        return MultiprocessIterator(
            np.arange(7), 3, shuffle=False, n_processes=1, shared_mem=100
        )

    with make() as first, make() as second:
        assert list(first.next()) == [0, 1, 2]
        save_npz(file := io.BytesIO(), first)
        file.seek(0)
        load_npz(file, second)
        for iterator in (first, second):
            batches = [list(iterator.next()) for _ in range(3)]
            assert batches == [[3, 4, 5], [6, 0, 1], [2, 3, 4]]
            assert iterator.epoch == 1
            assert iterator.current_position == 5


def check_repaired_modules_are_not_cached():
    """Neither read from nor written to `__pycache__`."""
    import os

    import chainer

    from _chainermn_startup import repairs

    folder = os.path.dirname(chainer.__file__)
    for name in {row.module for row in repairs.TABLE}:
        spec = sys.modules[name].__spec__
        repaired = isinstance(spec.loader, repairs.RepairingLoader)
        rows = [row for row in repairs.TABLE if row.module == name]
        assert repaired == any(row.since.is_broken() for row in rows), name
        *parents, module = name.split(".")[1:]
        cache = f"{module}.{sys.implementation.cache_tag}.pyc"
        assert not (
            repaired
            and cache in os.listdir(os.path.join(folder, *parents, "__pycache__"))
        )


def main():
    names = sys.argv[1:]
    if names[0] == "--without":
        from _chainermn_startup import repairs

        left_out = {int(row) for row in names[1].split(",")}
        table = enumerate(repairs.TABLE)
        repairs.TABLE = tuple(each for row, each in table if row not in left_out)
        names = names[2:]
    print(json.dumps({name: outcome(name) for name in names}))


def outcome(name):
    with warnings.catch_warnings():
        action = "ignore"
        if name.endswith("without_deprecation"):
            action = "error"
        warnings.simplefilter(action)
        # Python 3.12's own.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork")
        try:
            globals()[f"check_{name}"]()
        except BaseException:  # SystemExit too: it is one check that failed
            return traceback.format_exc()
    return None


if __name__ == "__main__":
    main()
