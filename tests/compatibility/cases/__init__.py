"""Calls of every public function, each a case: a function of ``chainermn`` and a communicator."""

from . import (
    checkpoints,
    communicators,
    configurations,
    datasets,
    evaluators,
    extensions,
    functions,
    iterators,
    links,
    modules,
    objects,
    optimizers,
    scripts,
)
from .table import CASES as CASES

__all__ = [
    "CASES",
    "checkpoints",
    "communicators",
    "configurations",
    "datasets",
    "evaluators",
    "extensions",
    "functions",
    "iterators",
    "links",
    "modules",
    "objects",
    "optimizers",
    "scripts",
]
