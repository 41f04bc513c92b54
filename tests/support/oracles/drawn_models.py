"""Models that Hypothesis draws: gradients of any dtype, layout and size, some missing; their mean.

They are drawn alike on all ranks. What a mean should be is computed in float64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.random import default_rng

from tests.support.worlds.models import Model, Param

# Of gradients and of wires; the first three are those that GPUs have, too.
DTYPES = ("float16", "float32", "float64", "bfloat16")
# By so many powers of ten an array's numbers differ from its exponent, up and down.
SPREADS = (0, 0, 2, 6, 25)
LAYOUTS = (
    "C",
    "F",
    "reversed",
    "read-only",
    "strided",
    "stride 0",
    "shared",
    "overlapping",
)


@dataclass(frozen=True)
class Entry:
    """One parameter: what its gradient is on the ranks that have it."""

    shape: tuple[int, ...]
    dtype: str
    layout: str
    # Ranks that have none, where missing ones are filled with zeros.
    missing: frozenset[int]
    exponent: int  # powers of ten, like spread
    spread: int = 0
    nowhere: bool = False  # no rank has one


def models(
    huge: list[tuple[int, ...]],
    copies: int,
    dtypes: Sequence[str] = DTYPES,
    spreads: Sequence[int] = SPREADS,
) -> st.SearchStrategy[list[Entry]]:
    """Models of a few arrays, of which some may be huge, and of up to so many small ones."""
    small = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)

    def entries(shapes: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[Entry]:
        return st.builds(
            Entry,
            shapes,
            st.sampled_from(dtypes),
            st.sampled_from(LAYOUTS),
            st.frozensets(st.integers(0, 3), max_size=3),
            st.integers(-3, 3),
            st.sampled_from(spreads),
            st.sampled_from([False] * 5 + [True]),
        )

    some = small | st.sampled_from([*huge, (1,), (4096,)])
    few = st.lists(entries(some), max_size=7)
    alike = st.builds(
        lambda entry, count: [entry] * count,
        entries(small | st.just((4096,))),
        st.integers(copies // 3, copies),
    )
    # Missing on different ranks, so that arrays in the same memory get different means.

    def pair(entry, layout, missing):
        return [
            entry,
            replace(entry, layout=layout, missing=missing),
        ]

    twins = st.builds(
        pair,
        entries(small | st.sampled_from([*huge, (4096,)])),
        st.sampled_from(["shared", "overlapping"]),
        st.frozensets(st.integers(0, 3), max_size=3),
    )
    return few | alike | twins


def _gradient(entry: Entry, index: int, rank: int) -> np.ndarray:
    rng = default_rng([index, rank, *entry.shape])
    values = rng.standard_normal(entry.shape)
    largest = float(ml_dtypes.finfo(entry.dtype).max)
    noise = rng.uniform(-1, 1, entry.shape)
    powers = entry.exponent + entry.spread * noise
    clipped = np.clip(values * 10.0**powers, -largest, largest)
    array = np.asarray(clipped).astype(entry.dtype)
    if entry.layout == "F" and array.ndim:
        return np.asfortranarray(array)
    if entry.layout == "reversed" and array.ndim:
        return array[::-1]
    if entry.layout == "strided" and array.ndim:
        return np.repeat(array, 2, axis=0)[::2]
    if entry.layout == "read-only":
        array.flags.writeable = False
    if entry.layout == "stride 0" and array.size:
        return np.lib.stride_tricks.as_strided(array, array.shape, (0,) * array.ndim)
    return array


def gradients(entries: Sequence[Entry], rank: int) -> list[np.ndarray]:
    """A rank's gradients; some are, or overlap, the one before."""
    found: list[np.ndarray] = []
    for index, entry in enumerate(entries):
        array = _gradient(entry, index, rank)
        if found and found[-1].dtype == array.dtype:
            before = found[-1]
            if entry.layout == "shared" and before.shape == array.shape:
                array = before
            if entry.layout == "overlapping" and before.size >= array.size:
                first = int(before.size > array.size)
                array = before.reshape(-1)[first : first + array.size].reshape(
                    array.shape
                )
        found.append(array)
    return found


def has(entry: Entry, rank: int, zero_fill: bool) -> bool:
    return not entry.nowhere and not (zero_fill and rank in entry.missing)


def _wrong(size, entries, grads, wire, zero_fill) -> list[str]:
    """Gradients that aren't the mean, computed in float64, but for rounding.

    The bound also says that no mean of two smallest numbers and more has become zero.
    """
    before = [gradients(entries, rank) for rank in range(size)]
    found = []  # one `assert` for all: each makes a text of what it compares
    for index, (entry, grad) in enumerate(zip(entries, grads, strict=True)):
        having = [rank for rank in range(size) if has(entry, rank, zero_fill)]
        if not having or grad is None:
            if having or grad is not None:
                found.append(f"{index}: {entry}: {grad}, and ranks {having} have one")
            continue
        terms = [before[rank][index].astype("f8") for rank in having]
        mean = sum(terms) / size
        scale = sum(map(np.abs, terms)) / size
        infos = [ml_dtypes.finfo(dtype) for dtype in (entry.dtype, wire or entry.dtype)]
        bound = 4 * max(float(info.eps) for info in infos) * scale
        bound += max(float(info.smallest_subnormal) for info in infos)
        # Of a mean that its dtypes don't hold nothing is said.
        holds = np.abs(mean) + bound <= min(float(info.max) for info in infos)
        alike = grad.dtype == entry.dtype and grad.shape == entry.shape
        if not alike or not np.all(
            np.abs(grad.astype("f8") - mean)[holds] <= bound[holds]
        ):
            found.append(f"{index}: {entry}: {grad!r}, and the mean is {mean}")
    return found


def model_of(entries, rank, zero_fill) -> Model:
    model = Model()
    for index, (entry, grad) in enumerate(
        zip(entries, gradients(entries, rank), strict=True)
    ):
        param = Param(np.zeros(entry.shape, entry.dtype))
        if has(entry, rank, zero_fill):
            param.grad = grad
        model.params[f"p{index:03}"] = param
    return model


def take_mean(comm, entries, zero_fill) -> list:
    """The gradients of such a model after their mean over ranks (collective)."""
    model = model_of(entries, comm.rank, zero_fill)
    comm.multi_node_mean_grad(model, zero_fill)
    return [param.grad for param in model.params.values()]


def digest(grads: list) -> str:
    """Of which gradients there are, and of their bits."""
    texts = (b"none" if grad is None else grad.tobytes() for grad in grads)
    return hashlib.sha1(b"next".join(texts)).hexdigest()


def check_model(comm, run: Callable[[], list], entries, wire, zero_fill):
    """Take the mean twice by `run`; ranks agree on what they find, so they stay in step."""
    comm.set_config("allreduce_grad_dtype", wire)
    grads = run()
    mine = digest(grads)
    wrong = _wrong(comm.size, entries, grads, wire, zero_fill)
    views = comm.allgather_obj((mine, digest(run()), wrong))
    found = {one for view in views for one in view[:2]}
    assert found == {mine}, "bits differ"
    for view in views:
        assert not view[2], views
