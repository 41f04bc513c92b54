"""Moves versions, pins and the changelog to a release: `python scripts/release.py 2.1.0`.

All five distributions get the version, each requires its siblings from that minor
version on, and the changelog's section of what is not released yet gets the version and
the day. Nothing is written unless all can be.
"""

from __future__ import annotations

import argparse
import datetime
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+")
OWN_VERSION = re.compile(r'^version = "(.*)"$', re.M)
SIBLING = re.compile(r'"(chainermn-(?:comm|train|modelparallel|tools))~=[\d.]+"')
FIRST_SECTION = re.compile(r"^## (\S+) \((.*)\)$", re.M)
UNRELEASED = "not released yet"


def project(text: str, version: str) -> str:
    """A pyproject.toml with that version and pins that go with it.

    Raises:
        ValueError: it has no version, or one that is not before ``version``.
    """
    found = OWN_VERSION.search(text)
    if not found:
        raise ValueError("has no line `version = ...`")
    if numbers(found[1]) > numbers(version):
        raise ValueError(f"is at {found[1]}, later than {version}")
    minor = ".".join(version.split(".")[:2])
    text = SIBLING.sub(rf'"\1~={minor}"', text)
    return OWN_VERSION.sub(f'version = "{version}"', text, count=1)


def changelog(text: str, version: str, day: str) -> str:
    """A changelog whose newest section is that version, released on that day.

    Raises:
        ValueError: it doesn't begin with a section of what is not released yet.
    """
    found = FIRST_SECTION.search(text)
    if not found or found[2] != UNRELEASED:
        raise ValueError(
            f"begin it with what changed, under `## {version} ({UNRELEASED})`"
        )
    return f"{text[: found.start()]}## {version} ({day}){text[found.end() :]}"


def numbers(version: str) -> tuple[int, ...]:
    """The version's parts, which compare as versions do."""
    return tuple(map(int, version.split(".")))


def release(root: Path, version: str, day: str) -> list[Path]:
    """Move everything below ``root``, and return what was written.

    Raises:
        ValueError: something can't be moved; nothing has been.
    """
    if not VERSION.fullmatch(version):
        raise ValueError(f"a version is three numbers such as 2.1.0, not {version!r}")
    texts: dict[Path, str] = {}
    problems = []
    folders = [root, *sorted((root / "packages").iterdir())]
    for file in [
        root / "CHANGELOG.md",
        *(folder / "pyproject.toml" for folder in folders),
    ]:
        try:
            text = file.read_text()
            if file.suffix == ".md":
                texts[file] = changelog(text, version, day)
            else:
                texts[file] = project(text, version)
        except (OSError, ValueError) as problem:
            problems.append(f"{file.relative_to(root)}: {problem}")
    if problems:
        raise ValueError("; ".join(problems))
    for file, text in texts.items():
        file.write_text(text)
    return list(texts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("version", help="three numbers")
    arguments = parser.parse_args()
    try:
        files = release(ROOT, arguments.version, datetime.date.today().isoformat())
    except ValueError as problem:
        parser.error(str(problem))
    for file in files:
        print(file.relative_to(ROOT))
    print(f"Look at the changes, commit, tag v{arguments.version}, and `make dist`.")


if __name__ == "__main__":
    main()
