"""What our code uses of CuPy, read from its source: names by their paths, and how they are called.

A path is as one would write it: `cupy.cuda.Stream().ptr` is an attribute of a stream.
What comes as an argument isn't followed: such objects are compared by their classes.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Call(NamedTuple):
    path: str
    positional: int
    keywords: tuple[str, ...]
    place: str


@dataclass
class Uses:
    names: set[str] = field(default_factory=set)
    calls: set[Call] = field(default_factory=set)


class _Reader(ast.NodeVisitor):
    """Reads one module, given the functions of `devices` by what they return."""

    def __init__(self, uses: Uses, file: Path, returns: dict[str, str]) -> None:
        self.uses, self.file, self.returns = uses, file, returns
        self.known: dict[str, str] = {}

    def path(self, node: ast.AST) -> str | None:
        """The path of what an expression gives, if it begins at CuPy."""
        if isinstance(node, ast.Attribute):
            inner = self.path(node.value)
            return (
                self.known.get(ast.unparse(node))
                if inner is None
                else f"{inner}.{node.attr}"
            )
        if isinstance(node, ast.Call):
            inner = self.path(node.func)
            name = ast.unparse(node.func).removeprefix("devices.").removeprefix("self.")
            if inner is not None:
                return f"{inner}()"
            # What is given a function to call may return what that makes.
            made = [
                self.path(arg.body) for arg in node.args if isinstance(arg, ast.Lambda)
            ]
            return self.returns.get(name) or next(filter(None, made), None)
        if isinstance(node, ast.IfExp):  # CuPy or NumPy
            return self.path(node.body) or self.path(node.orelse)
        return self.known.get(node.id) if isinstance(node, ast.Name) else None

    def visit_Import(self, node: ast.Import) -> None:
        self.known |= {
            a.asname or a.name: a.name for a in node.names if a.name == "cupy"
        }

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] == "cupy":
            for alias in node.names:
                self.known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self.uses.names.add(f"{node.module}.{alias.name}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = dict(self.known)
        self.known |= {arg.arg: "cupy" for arg in node.args.args if arg.arg == "cupy"}
        self.generic_visit(node)
        for inner in ast.walk(node):
            if (
                isinstance(inner, ast.Return | ast.Yield)
                and (path := self.path(inner.value)) is not None
            ):
                self.returns[node.name] = path
        ours = {
            name: path for name, path in self.known.items() if name.startswith("self.")
        }
        self.known = before | ours

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        self.generic_visit(node)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            self._bind(target, node.value)

    visit_AnnAssign = visit_Assign

    def _bind(self, target: ast.AST, value: ast.AST | None) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._bind(one, other)
        elif (path := self.path(value)) is not None:
            self.known[ast.unparse(target)] = path

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if item.optional_vars is not None:
                self._bind(item.optional_vars, item.context_expr)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if (path := self.path(node)) is not None:
            self.uses.names.add(path)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if (path := self.path(node.func)) is not None:
            self.uses.names.add(path)
            keywords = tuple(keyword.arg or "**" for keyword in node.keywords)
            place = f"{self.file.name}:{node.lineno}"
            self.uses.calls.add(Call(path, len(node.args), keywords, place))
        if (
            ast.unparse(node.func) == "hasattr"
            and (path := self.path(node.args[0])) is not None
        ):
            self.uses.names.add(f"{path}.{ast.literal_eval(node.args[1])}")


def uses() -> Uses:
    """Everything that our code takes from CuPy, in the packages and the benchmarks."""
    found, returns = Uses(), {}
    every = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    files = [file for file in every if re.search("devices|cupy", file.read_text())]
    for file in sorted(files, key=lambda file: file.name != "devices.py"):
        own = returns if file.name == "devices.py" else dict(returns)
        # Functions are used before they are read, and use such themselves.
        for _ in range(3):
            _Reader(found, file, own).visit(ast.parse(file.read_text()))
    return found
