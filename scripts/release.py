"""Moves the five distributions and the changelog to a version: `make release VERSION=2.1.0`.

All five get the version, each requires its siblings from that minor version on, and the
changelog's section of what is not released yet gets the version and the day.
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNRELEASED = re.compile(r"^# .*\n[^#]*^## \S+ (\(not released yet\))$", re.M)
VERSION = re.compile(r'^version = "\d+\.\d+\.\d+"$', re.M)
SIBLING = re.compile(r'"(chainermn-(?:comm|train|modelparallel|tools))~=[\d.]+"')


def release(root: Path, version: str, day: str) -> None:
    """Move everything below ``root``.

    Raises:
        ValueError: the version or the changelog is none to release; nothing has changed.
    """
    parts = re.fullmatch(r"(\d+\.\d+)\.\d+", version)
    if not parts:
        raise ValueError(f"a version is three numbers such as 2.1.0, not {version!r}")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text()
    newest = UNRELEASED.search(text)
    if not newest:
        raise ValueError(f"begin {changelog} with `## {version} (not released yet)`")
    title = text[: newest.start(1)].rpartition("\n")[0]
    changelog.write_text(f"{title}\n## {version} ({day}){text[newest.end() :]}")
    for file in [root / "pyproject.toml", *root.glob("packages/*/pyproject.toml")]:
        project = VERSION.sub(f'version = "{version}"', file.read_text(), count=1)
        file.write_text(SIBLING.sub(rf'"\1~={parts[1]}"', project))


if __name__ == "__main__":
    try:
        release(ROOT, "".join(sys.argv[1:]), datetime.date.today().isoformat())
    except ValueError as problem:
        sys.exit(str(problem))
    print("Look at the changes, commit, tag, and push the tag: CONTRIBUTING.md.")
