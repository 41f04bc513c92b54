"""What the manual names is there: functions, files, variables."""

import pkgutil
import re
import tomllib

from .blocks import PAGES, ROOT

TEXTS = {page: (ROOT / page).read_text() for page in [*PAGES, "CONTRIBUTING.md"]}
FOLDERS = ("benchmarks", "docs", "examples", "packages", "scripts", "src", "tests")
# Files of the repository, as paths that begin with a slash.
FILES = [
    f"/{path.relative_to(ROOT)}"
    for path in [
        *ROOT.glob("*.py"),
        *(each for f in FOLDERS for each in (ROOT / f).rglob("*.*")),
    ]
    if path.suffix in (".py", ".md", ".pth", ".start", ".svg")
]
# Scripts of the reader, which the repository doesn't have.
THEIRS = {"train.py", "your_script.py", "script.py", "setup.py"}


def named(pattern, pages=PAGES):
    """Each page with each thing that it names so; there must be some."""
    found = [
        (page, name) for page in pages for name in re.findall(pattern, TEXTS[page])
    ]
    assert found
    return sorted(set(found))


def can_be_imported(path):
    try:
        pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return False
    return True


def test_dotted_names_of_ours_can_be_imported():
    assert not [
        f"{page}: {path}"
        for page, path in named(r"`(chainermn\w*(?:\.\w+)+)")
        if path.rpartition(".")[2] not in ("py", "pth", "start")
        and not can_be_imported(path)
    ]


def test_files_exist():
    made = set(named(r'title="([^"]+)"'))  # on the page itself
    files = [each for each in named(r"`([\w/.-]+\.py)`") if each[1] not in THEIRS]
    assert not [
        f"{page}: there is no {name}"
        for page, name in set(files) - made
        if not any(file.endswith(f"/{name}") for file in FILES)
    ]


def test_links_of_readmes_lead_to_files():
    """The manual's own links are looked at when it is built."""
    readmes = [page for page in PAGES if page.endswith("README.md")]
    assert not [
        f"{page}: {target}"
        for page, target in named(r"\]\(([^)#]+)[^)]*\)", readmes)
        if "://" not in target and not (ROOT / page).parent.joinpath(target).exists()
    ]


def test_variables_are_read_somewhere():
    sources = "".join(file.read_text() for file in ROOT.glob("packages/**/*.py"))
    # With "_" before it, it is click's.
    variables = named(r"(?<!_)CHAINERMN_[A-Z_]*[A-Z]")
    assert not [
        f"{page}: nothing reads {v}" for page, v in variables if f'"{v}"' not in sources
    ]


def test_the_page_on_moving_tells_each_difference():
    """Those in which the tests let this version differ from older ones."""
    path = ROOT / "tests" / "compatibility" / "given" / "differences.toml"
    rows = {each["row"] for each in tomllib.loads(path.read_text())["difference"]}
    assert rows
    page = " ".join(TEXTS["docs/moving.md"].split())
    assert [row for row in rows if row not in page] == []


def test_targets_of_make_exist():
    """Those that sentences name, and those in blocks for the shell."""
    found = re.findall(r"^([\w%-]+):", (ROOT / "Makefile").read_text(), re.M)
    patterns = "|".join(target.replace("%", "[\\w.]+") for target in found)
    targets = named(
        r"(?m)(?:`|^ {4}|^(?=make [\w-]+ *(?:#|$)))make\s([a-z][\w-]*)", TEXTS
    )
    assert not [
        f"{page}: make {target}"
        for page, target in targets
        if not re.fullmatch(patterns, target)
    ]
