"""`chainermn report`: one file that a browser shows. No MPI."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.commands import chainermn, invoke
from tests.support.tools.traces import Made, write_many, write_two
from tests.tools.browser import opened
from tests.tools.pages import Page

EVIL = '</script><script>document.documentElement.dataset.evil="yes"</script><b>&amp;\x1b"\'<!--'
LOG = [
    {
        "main/loss": 2.5 / n,
        "validation/main/loss": 3 / n,
        "lr": 1e-5,
        "iteration": 10 * n,
    }
    for n in range(1, 6)
]


def result(
    folder: Path, log: Any = LOG, traced: bool = True, **environment: Any
) -> Path:
    """A folder as a trainer leaves it, with a trace and an environment in it."""
    folder.mkdir(exist_ok=True)
    (folder / "log").write_text(json.dumps(log))
    found = {"schema": 1, "packages": {"chainer": "7.8.1"}, **environment}
    (folder / "env.json").write_text(json.dumps(found))
    if traced:
        write_two(folder / "trace")
    return folder


def reported(*results: object) -> Path:
    """The page that `chainermn report` writes."""
    file = Path(str(results[0])).parent / "page.html"
    done = invoke("report", *results, "--output", file)
    assert done.exit_code == 0, done.output
    return file


def refused(*arguments: object) -> str:
    done = invoke("report", *arguments)
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


def test_a_page_has_all_parts_and_needs_no_network(tmp_path):
    file = reported(result(tmp_path / "result"))
    page = Page(file.read_text())
    assert [*page.sections] == [
        *("curves", "timeline", "operations", "ranks", "late_ranks", "longest_waits"),
        "environment",
    ]
    assert "Others wait most for rank 1 on here" in page.text
    assert re.search(r"allreduce\s+4\s+140 µs", page.sections["operations"])
    assert re.search(r"packages\s+chainer\s+7\.8\.1", page.sections["environment"])
    assert str(tmp_path / "result" / "env.json") in page.sections["environment"]
    assert not {"src", "href", "action"} & {name for name, _ in page.attributes}
    loads = re.findall(r"https?://[^\s\"']*|url\(|@import|fetch\(", file.read_text())
    # Names.
    assert {*loads} == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}
    (policy,) = [
        value for name, value in page.attributes if value and "default-src" in value
    ]
    assert policy.startswith("default-src 'none'")
    assert page.data["timeline"]["complete"]
    assert [chart["name"] for chart in page.data["curves"]["charts"]] == ["loss", "lr"]


def test_a_browser_draws_it(tmp_path):
    page = Page(opened(reported(result(tmp_path / "result"))))
    assert page.root == {"data-drawn": "yes", "data-rank": "1"}  # the last rank's row
    assert "rank 0 · here" in page.sections["timeline"]
    assert "rank 1 · here" in page.sections["timeline"]
    assert "validation/main/loss" in page.sections["curves"]
    assert page.tags.count("figure") == 2
    assert {"canvas", "path"} <= {*page.tags}
    assert page.sections["longest_waits"].count("show") == 2
    assert "75%" not in page.sections["operations"]
    assert "29% waiting" in page.sections["operations"]


def test_foreign_text_stays_text(tmp_path):
    """Hosts, operations, runs and names of values may be anything."""
    folder = result(tmp_path / "result", [{EVIL: 1.0, "iteration": 1}], traced=False)
    for rank in range(2):
        made = Made(folder, rank, 2, host=EVIL).communicator(EVIL, [0, 1])
        made.call(EVIL, rank, 5, sequence=1, communicator=EVIL, error=EVIL).write()
    file = reported(folder)
    page = Page(file.read_text())
    assert page.tags.count("script") == 2
    assert "b" not in page.tags
    assert "\x1b" not in file.read_text()
    assert page.data["timeline"]["names"] == [EVIL]
    drawn = Page(opened(file))
    assert drawn.root == {"data-drawn": "yes", "data-rank": "1"}
    assert "dataset.evil" in drawn.sections["timeline"]


def test_without_a_trace_or_a_log_it_says_so(tmp_path):
    file = reported(result(tmp_path / "learned", traced=False))
    page = Page(opened(file))
    assert [*page.sections] == ["curves", "environment"]
    assert "not found: a trace, which a job with CHAINERMN_TRACE writes" in page.text
    assert page.root == {"data-drawn": "yes"}
    write_two(tmp_path / "traced")
    page = Page(opened(reported(tmp_path / "traced")))
    assert "curves" not in page.sections
    assert "not found: a log of LogReport" in page.text
    assert page.root == {"data-drawn": "yes", "data-rank": "1"}


def test_files_may_be_given_one_by_one(tmp_path):
    folder = result(tmp_path / "result")
    whole = Page(reported(folder).read_text())
    (folder / "log").rename(tmp_path / "other log")
    (trace, _) = sorted((folder / "trace").iterdir())
    file = reported(tmp_path / "other log", folder / "env.json", trace)
    assert Page(file.read_text()).data == whole.data


def test_without_a_file_the_environment_is_that_of_this_machine(tmp_path):
    folder = result(tmp_path / "result", traced=False)
    (folder / "env.json").unlink()
    # In a process of its own, since it starts no program any more when it is done.
    done = chainermn("report", folder, "--output", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    text = Page((tmp_path / "page.html").read_text()).sections["environment"]
    assert "where this page was made" in text
    assert "chainermn-tools" in text


def test_a_run_without_calls_is_shown(tmp_path):
    Made(tmp_path / "trace", 0, 1).write()
    page = Page(opened(reported(tmp_path / "trace")))
    assert page.root == {"data-drawn": "yes", "data-rank": "0"}


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("log", "[", "log of LogReport: Expecting value"),
        ("log", "[]", "log is not a log of LogReport"),
        ("log", "[1]", "log is not a log of LogReport"),
        ("log", "[" * 100_000, "log of LogReport: maximum recursion"),
        ("env.json", '{"a": 1}', "is not what `chainermn env --json` prints"),
        ("trace/x.rank0.json", "[", "doesn't begin as a trace does"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, why):
    folder = result(tmp_path / "result", traced=False)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    assert why in refused(folder)


def test_a_folder_that_may_not_be_read_costs_no_other(tmp_path, monkeypatch):
    folder = result(tmp_path / "result")
    (folder / "another's").mkdir()
    listed = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path.name == "another's":
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert reported(folder).exists()


def test_wrong_arguments_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is neither a file nor a folder" in refused(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    said = refused(tmp_path / "empty")
    assert "not found: a log of LogReport; not found: a trace" in said
    assert "CHAINERMN_TRACE" in said
    assert "nowhere can't be read: No such file" in refused(tmp_path / "nowhere")
    assert "Missing argument" in refused()
    folder = result(tmp_path / "one", traced=False)
    other = result(tmp_path / "two", traced=False)
    assert "are both a log of LogReport: give one of them" in refused(folder, other)
    assert "can't be written" in refused(
        folder, "--output", tmp_path / "nowhere" / "x.html"
    )


@pytest.mark.parametrize(
    "calls", [40_000, pytest.param(1_000_000, marks=pytest.mark.full)]
)
def test_a_long_trace_makes_a_page_that_a_browser_can_open(tmp_path, calls):
    """Time-outs of the browser, and the page's size, don't grow with the trace."""
    write_many(tmp_path / "trace", ranks=8, calls=calls)
    file = reported(tmp_path / "trace")
    assert file.stat().st_size < 2_000_000
    found = Page(file.read_text()).data["timeline"]
    assert not found["complete"]
    assert len(found["calls"]["row"]) == 20_000
    page = Page(opened(file))
    assert page.root == {"data-drawn": "yes", "data-rank": "7"}
