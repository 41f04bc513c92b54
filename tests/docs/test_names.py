"""What the manual names is there: functions, files, variables."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from .blocks import PAGES, ROOT

TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
FOLDERS = ("benchmarks", "docs", "examples", "packages", "scripts", "src", "tests")
# Files of the repository, as paths that begin with a slash.
FILES = [
    f"/{path.relative_to(ROOT)}"
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix in (".py", ".md", ".pth", ".start", ".svg")
]
# Scripts of the reader, which the repository doesn't have.
THEIRS = {"train.py", "your_script.py", "script.py", "setup.py"}


def resolve(path: str) -> Any:
    """The object of a dotted path."""
    names = path.split(".")
    found: Any = importlib.import_module(names[0])
    for index, name in enumerate(names[1:], 2):
        if not hasattr(found, name):
            importlib.import_module(".".join(names[:index]))
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_dotted_names_of_ours_can_be_imported(page: str) -> None:
    for path in sorted(set(re.findall(r"`(chainermn\w*(?:\.\w+)+)", TEXTS[page]))):
        if path.rpartition(".")[2] in ("py", "pth", "start"):
            continue
        resolve(path)


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str) -> None:
    made = set(re.findall(r'title="([^"]+)"', TEXTS[page]))
    for name in sorted(set(re.findall(r"`([\w/.-]+\.py)`", TEXTS[page])) - THEIRS - made):
        assert any(file.endswith(f"/{name}") for file in FILES), f"there is no {name}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith("README.md")])
def test_links_of_readmes_lead_to_files(page: str) -> None:
    """The manual's own links are looked at when it is built."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXTS[page]):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_variables_are_read_somewhere() -> None:
    sources = "".join(
        (ROOT / file[1:]).read_text()
        for file in FILES
        if file.startswith("/packages/") and file.endswith(".py")
    )
    for page, text in TEXTS.items():
        for name in sorted(set(re.findall(r"CHAINERMN_[A-Z_]*[A-Z]", text))):
            assert f'"{name}"' in sources, f"{page}: nothing reads {name}"
