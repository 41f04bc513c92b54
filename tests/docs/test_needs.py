"""What READMEs and the manual say that each package needs is what its pyproject.toml declares."""

import re
import tomllib

import pytest

from .blocks import ROOT

FOLDERS = [ROOT, *sorted((ROOT / "packages").iterdir())]
PROJECTS = {
    project["name"]: project
    for folder in FOLDERS
    for project in [tomllib.loads((folder / "pyproject.toml").read_text())["project"]]
}
PARTS = sorted(PROJECTS.keys() - {"chainermn"})
# Words of such a text that name no package.
JOINING = {"and"}


def declared(name):
    return {re.match(r"[\w-]+", one)[0] for one in PROJECTS[name]["dependencies"]}  # type: ignore[index]


def said(text):
    """The packages in a text such as "`-comm`, NumPy and click"."""
    if text == "the four":
        return set(PARTS)
    names = re.findall(r"[A-Za-z][\w-]*", text.replace("`-", "`chainermn-"))
    return {name.lower() for name in names} - JOINING


def rows(page, head):
    """The cells of the table of a page whose head begins so."""
    (table,) = re.findall(
        rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", (ROOT / page).read_text(), re.M
    )
    return [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in table.splitlines()
    ]


def test_the_table_says_what_packages_need():
    table = rows("docs/installation.md", "distribution")
    found = {name.strip("`"): said(needs) for name, _, needs in table}
    assert found == {name: declared(name) for name in PROJECTS}


@pytest.mark.parametrize("name", PARTS)
def test_a_packages_own_readme_says_what_it_needs(name):
    text = (ROOT / "packages" / name / "README.md").read_text()
    (needs,) = re.findall(r"It needs ([^;]*?)(?:[.;]\s|,\s+and none)", text)
    assert said(needs) == declared(name)


def test_the_table_of_extras_has_them_all():
    found = {
        (name, package)
        for extras, packages, _ in rows("docs/installation.md", "extra")
        for name in re.findall(r"`(\w+)`", extras)
        for package in re.findall(r"`([\w-]+)`", packages)
    }
    assert found == {
        (extra, name)
        for name, project in PROJECTS.items()
        for extra in project.get("optional-dependencies", {})
    }
