"""Describes values in JSON: types by name, shapes, dtypes, values; and tells descriptions apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from chainer import Variable

# Means of float32 that are added up in another order.
CLOSE = {"rel_tol": 1e-5, "abs_tol": 1e-6}


def describe(value):
    """What JSON can hold of it; an object of another class is its class's name."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray):
        return {
            "type": "ndarray",
            "dtype": value.dtype.name,
            "shape": list(value.shape),
            "writable": value.flags.writeable,
            "values": value.tolist()
            if value.dtype.kind in "biuf"
            else list(map(str, value.flat)),
        }
    if isinstance(value, np.generic):
        return {"type": value.dtype.name, "value": value.item()}
    if isinstance(value, Variable):
        array = describe(value.array)
        return {
            "type": "Variable",
            "array": array,
            "requires_grad": value.requires_grad,
        }
    if type(value) in (list, tuple, set):
        items = value
        if isinstance(value, set):
            items = sorted(value)
        return {
            "type": type(value).__name__,
            "items": [describe(item) for item in items],
        }
    if isinstance(value, Mapping):
        items = {str(key): describe(item) for key, item in value.items()}
        return {"type": type(value).__name__, "items": items}
    if isinstance(value, type):
        return {"class": value.__name__}
    if isinstance(value, BaseException):
        return {"raises": [kind.__name__ for kind in type(value).__mro__]}
    return {"type": type(value).__name__}


def differences(before, now, where: str = "") -> Iterator[str]:
    """Where two descriptions differ: ``PATH: BEFORE -> NOW``.

    What is raised now may be derived from what was raised.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        if "raises" in before and "raises" in now:
            if before["raises"][0] not in now["raises"]:
                yield told(where, before, now)
        elif before.keys() != now.keys() or before.get("type") != now.get("type"):
            yield told(where, before, now)
        else:
            for key in before:
                yield from differences(before[key], now[key], f"{where}.{key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif type(before) is not type(now) or not same(before, now):
        yield told(where, before, now)


def same(before, now) -> bool:
    if isinstance(before, float):
        return math.isclose(before, now, **CLOSE) or (
            math.isnan(before) and math.isnan(now)
        )
    return bool(before == now)


def told(where: str, before, now) -> str:
    return f"{where}: {said(before)} -> {said(now)}"


def said(description) -> str:
    """In a line, as Python would write it, but for NumPy's and Chainer's: ``float32[1.0, 2.0]``."""
    if isinstance(description, float):
        return f"{description:.6}"
    if isinstance(description, list):
        return f"[{', '.join(map(said, description))}]"
    if not isinstance(description, dict):
        return repr(description)
    if "raises" in description:
        return f"{description['raises'][0]}({description.get('text', '')!r})"
    if "class" in description:
        return str(description["class"])
    if "dtype" in description:
        return f"{description['dtype']}{said(description['values'])}"
    if "array" in description:
        return f"Variable({said(description['array'])})"
    if "value" in description:
        return f"{description['type']}({said(description['value'])})"
    if "items" in description:
        items = description["items"]
        if isinstance(items, dict):
            inner = mapping(items)
        else:
            inner = said(items)
        return f"{description['type']}({inner})"
    if "type" in description:
        return str(description["type"])
    return mapping(description)


def mapping(items: Mapping[str, Any]) -> str:
    return f"{{{', '.join(f'{key}: {said(value)}' for key, value in sorted(items.items()))}}}"
