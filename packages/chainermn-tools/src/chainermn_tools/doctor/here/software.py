"""Checks of Python, of what is installed, and of what `import chainermn` and `chainer` give."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

from packaging.utils import canonicalize_name

from chainermn_tools import jobs
from chainermn_tools.doctor import facts
from chainermn_tools.doctor.advice import about
from chainermn_tools.doctor.check import Answer, Context, check, failed, ok, skipped, warning
from chainermn_tools.doctor.here import requirements
from chainermn_tools.environment import packages as installed
from chainermn_tools.environment import probe

OLDEST, NEWEST = (3, 10), (3, 13)
FACADE = "chainermn_facade"
INSTALL_ALL = "install ChainerMN's packages together, from its repository or its wheels"


@check("python", "Is this Python one that ChainerMN was made for?")
def python(context: Context) -> Answer:
    version, here = sys.version_info[:2], f"{platform.python_version()}, {sys.executable}"
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if platform.system() != "Linux":
        return failed(
            f"{here} on {platform.system()}", "use Linux: ChainerMN was made for it alone"
        )
    if platform.python_implementation() != "CPython":
        return failed(f"{here} is {platform.python_implementation()}", f"use CPython {span}")
    if version < OLDEST:
        return failed(here, f"use Python {span}")
    if version > NEWEST:
        return warning(f"{here} is newer than what was tested, {span}", f"use Python {span}")
    return ok(here)


@check("packages", "Are the packages there that the installed ones need, in fitting versions?")
def packages(context: Context) -> Answer:
    versions = context.once(facts.versions)
    misfits = requirements.misfits(
        [name for name in installed.OURS if versions[name] is not None], _version, _requires
    )
    cupys = sorted(name for name, v in versions.items() if name.startswith("cupy") and v)
    shown = [f"{name} {versions[name]}" for name in (*installed.OURS, "chainer", "numpy", "mpi4py")]
    found = ", ".join(one for one in shown if not one.endswith(" None"))
    if misfits:
        said = [
            f"{who} needs {what}, {'which is missing' if version is None else f'not {version}'}"
            for who, what, version in misfits
        ]
        return failed("; ".join(said), _install(misfits[0][1]))
    if len(cupys) > 1:
        return warning(
            f"several packages hold one and the same cupy: {', '.join(cupys)}",
            f"pip uninstall -y {' '.join(cupys)}   # then install the one for your CUDA again",
        )
    return ok(found)


@check("import chainermn", "Does `import chainermn` give this project, and not Chainer's old copy?")
def import_chainermn(context: Context) -> Answer:
    found = probe.call_in_subprocess(installed.imports, facts.seconds(context))
    origin, finder = found["chainermn"], found["finder"]
    versions = context.once(facts.versions)
    if versions["chainermn"] is None or versions["chainermn"].startswith("1."):
        if origin is None:
            return skipped("the meta-package chainermn is not installed, only parts of it")
        return failed(
            f"it gives {origin}, since the package of this project is missing", INSTALL_ALL
        )
    if origin is not None and FACADE in origin:
        return ok(f"it gives {origin}; the start-up finder is {finder}")
    if os.environ.get("CHAINERMN_USE_BUNDLED") == "1":
        said = f"CHAINERMN_USE_BUNDLED is 1, so it gives {origin}"
        return warning(said, "unset CHAINERMN_USE_BUNDLED")
    if finder != "registered":
        return failed(
            f"it gives {origin}, since the start-up finder didn't run: Python reads .pth files of "
            "its environment's own folders alone, not of --target or PYTHONPATH, nor with -S",
            "install with pip into an environment, or write `import chainermn_comm` before "
            "`import chainermn`",
        )
    return failed(f"it gives {origin}", INSTALL_ALL)


@check("import chainer", "Can Chainer be imported?", needs=("packages",))
def import_chainer(context: Context) -> Answer:
    if context.once(facts.versions)["chainer"] is None:
        return skipped("Chainer is not installed")
    try:
        return ok(probe.call_in_subprocess(chainer, facts.seconds(context)))
    except jobs.Unavailable as problem:
        if os.environ.get("CHAINERMN_NO_COMPAT") == "1":
            fix = (
                "unset CHAINERMN_NO_COMPAT: it keeps Chainer from being repaired as it is imported"
            )
        else:
            fix = about(problem, f"see what fails: {sys.executable} -c 'import chainer'")
        return failed(str(problem), fix)


def chainer() -> str:
    """Chainer's version, once it is imported. Call it in a child process."""
    import chainer
    import numpy

    return f"Chainer {chainer.__version__} on NumPy {numpy.__version__}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name) or "unknown"
    except metadata.PackageNotFoundError:
        return None
    except KeyError:  # an interrupted installation leaves metadata without a version
        return "unknown"


def _requires(name: str) -> list[str]:
    return metadata.requires(name) or []


def _install(requirement: str) -> str:
    """How to get what is missing; the public index's `chainermn` is another one."""
    if canonicalize_name(requirement).startswith("chainermn"):
        return INSTALL_ALL
    return f"{sys.executable} -m pip install '{requirement}'"
