"""GitHub and commits run what `make` runs, on the Pythons that we support."""

import re

import yaml

from tests.support.hosts.interpreters import PYTHONS
from tests.support.jobs.commands import BIN, run
from tests.support.jobs.scripts import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def jobs():
    """Each job of a workflow, by its file and name."""
    for path in WORKFLOWS:
        for name, job in read(f".github/workflows/{path.name}")["jobs"].items():
            yield f"{path.stem} {name}", job


def test_actionlint_finds_nothing_in_the_workflows():
    # Alone: it would call what else a machine happens to have.
    done = run(BIN / "actionlint", "-shellcheck=", "-pyflakes=", *WORKFLOWS)
    assert done.returncode == 0
    assert done.stdout == ""
    assert done.stderr == ""


def test_all_supported_pythons_are_tested_and_no_other_is_named():
    matrix = read(".github/workflows/tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    assert tuple(matrix["python"]) == PYTHONS
    assert matrix["mpi"] == ["mpich"]
    assert {more["mpi"] for more in matrix["include"]} == {"openmpi"}
    named = {more["python"] for more in matrix["include"]}
    for _, job in jobs():
        named |= {
            step.get("with", {}).get("python-version") for step in job.get("steps", [])
        }
    assert named - {None, "${{ matrix.python }}"} <= set(PYTHONS)


def test_each_job_ends_and_may_do_little():
    for path in WORKFLOWS:
        assert read(f".github/workflows/{path.name}")["permissions"] == {
            "contents": "read"
        }
    rights = {name: job["permissions"] for name, job in jobs() if "permissions" in job}
    assert rights == {"release publish": {"id-token": "write"}}
    endless = [
        name for name, job in jobs() if not {"timeout-minutes", "uses"} & job.keys()
    ]
    assert endless == []


def test_commits_are_checked_by_what_make_lint_runs():
    makefile = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.M)
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    made = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    assert [hook["entry"] for hook in repository["hooks"]] == made
    for hook in repository["hooks"]:
        assert not hook["pass_filenames"]
