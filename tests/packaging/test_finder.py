"""`import chainermn` and `import chainer` are made right however things were installed."""

import json

import pytest

from tests.support.jobs.scripts import ROOT

EDITABLE = [*sorted((ROOT / "packages").iterdir()), ROOT]
WHOSE = "import chainermn, chainer; print(chainermn.__file__)"
SPAWNING = """
import multiprocessing, sys

def whose():
    import chainermn
    return chainermn.__file__

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.apply(whose))
"""


def is_ours(printed):
    return printed.strip().endswith("chainermn_facade/__init__.py")


@pytest.fixture
def bare(environment, environment_once):
    """What the five distributions need from elsewhere, and what builds them, without Chainer."""
    needs = "mpich mpi4py numpy click rich threadpoolctl six filelock typing_extensions protobuf"
    what = (*needs.split(), "pip", "hatchling")
    return environment(of=environment_once("needs", lambda env: env.install(*what)))


def install(installer, env, *what):
    if installer == "pip":
        # Which pip allows no constraint for.
        isolated = "--no-build-isolation" not in what
        command = [
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--force-reinstall",
            *what,
        ]
        if isolated:
            variables = None
        else:
            variables = {"PIP_BUILD_CONSTRAINT": ""}
        env.run(*command, env=variables)
    else:
        env.install("--no-deps", "--reinstall", *what)


@pytest.mark.parametrize(
    "installer", ["pip", pytest.param("uv", marks=pytest.mark.full)]
)
def test_ours_is_found_in_any_order_of_installation(installer, bare, wheels):
    # pip compiles its modules: those caches are stale.
    install(installer, bare, "chainer")
    install(installer, bare, *wheels.values())
    assert is_ours(bare.run("-c", WHOSE))
    install(installer, bare, "chainer")
    assert is_ours(bare.run("-c", WHOSE))
    assert is_ours(bare.run("-I", "-c", WHOSE))
    bundled = bare.run("-c", WHOSE, env={"CHAINERMN_USE_BUNDLED": "1"})
    assert bundled.strip() == str(bare.site_packages / "chainermn/__init__.py")


@pytest.mark.full  # the environment that runs the tests is one
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_editable_installs_work(installer, bare):
    install(installer, bare, "chainer")
    sources = [part for source in EDITABLE for part in ("-e", str(source))]
    install(installer, bare, "--no-build-isolation", *sources)
    found = bare.run("-I", "-c", WHOSE).strip()
    assert found == str(ROOT / "src/chainermn_facade/__init__.py")


def test_subprocesses_find_ours(everything, tmp_path):
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    for method in ("fork", "forkserver", "spawn"):
        assert is_ours(everything.run("-I", script, method)), method


def test_without_the_meta_package_chainermn_is_chainers(
    environment, everything, wheels
):
    env = environment(of=everything)
    env.uninstall("chainermn")
    assert not is_ours(env.run("-c", WHOSE))
    env.install("--no-deps", wheels["chainermn"])
    assert is_ours(env.run("-c", WHOSE))


def test_uninstalling_leaves_nothing_that_runs(environment, wheels):
    env = environment()
    env.install("--no-deps", wheels["chainermn-comm"])
    assert "_chainermn_startup" in env.run("-c", "import sys; print(list(sys.modules))")
    env.uninstall("chainermn-comm")
    assert not list(env.site_packages.glob("*chainermn*"))
    assert env.run("-c", "pass") == ""


def test_target_folder_is_served_by_import_of_chainermn_comm(bare, wheels, tmp_path):
    """`.pth` files don't run in folders on PYTHONPATH, which is how `--target` is used."""
    install("uv", bare, "--target", tmp_path, "chainer", *wheels.values())
    path = {"PYTHONPATH": str(tmp_path)}
    finder = "'_chainermn_startup' in sys.modules"
    bare.run("-c", f"import sys; assert not ({finder})", env=path)
    bare.run("-c", f"import sys, chainermn_comm; assert {finder}", env=path)
    assert is_ours(bare.run("-c", f"import chainermn_comm; {WHOSE}", env=path))
    # May come before Chainer, too.
    for name in ("chainermn_train", "chainermn_modelparallel"):
        bare.run("-c", f"import {name}, chainer; chainer.Variable", env=path)


def test_an_interpreter_that_imports_neither_pays_almost_nothing(
    environment, everything
):
    """Start-up imports one module of ours and none besides; it reads no other file."""
    env = environment(of=everything)
    asked = "import sys, json; print(json.dumps(sorted(sys.modules)))"
    with_us = set(json.loads(env.run("-I", "-c", asked)))
    unrelated = "import json, argparse, importlib.metadata, sys;"
    env.run("-c", f"{unrelated} assert '_chainermn_startup.repairs' not in sys.modules")
    for suffix in ("pth", "start"):  # which of them counts follows from the Python
        (env.site_packages / f"chainermn.{suffix}").unlink()
    # From Python 3.15 on, `site` imports modules of its own where there is a start-up
    # file at all.
    (env.site_packages / "other.start").write_text("sys:getswitchinterval\n")
    without = set(json.loads(env.run("-I", "-c", asked)))
    assert with_us - without == {"_chainermn_startup"}


def test_start_file_names_what_the_pth_file_calls(everything):
    """PEP 829: Python 3.15 calls the function that `.start` names, and 3.18 only that."""
    start = (everything.site_packages / "chainermn.start").read_text()
    assert start == "_chainermn_startup:register\n"
    everything.run(
        "-c",
        "import pkgutil, sys; before = list(sys.meta_path)\n"
        "pkgutil.resolve_name('_chainermn_startup:register')()\n"
        "assert sys.meta_path == before, 'registered twice'\n"
        "names = [getattr(finder, '__name__', '') for finder in sys.meta_path]\n"
        "assert names.index('Finder') < names.index('PathFinder')\n",
    )
