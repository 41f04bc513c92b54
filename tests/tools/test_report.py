"""`chainermn report`: one file that a browser shows. No MPI."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.commands import chainermn, invoke
from tests.support.tools.traces import Made, write_many, write_two
from tests.tools.browser import opened
from tests.tools.pages import Page

EVIL = '</script><script>document.documentElement.dataset.evil="yes"</script><b>&amp;\x1b"\'<!--'
LOG = [
    {"main/loss": 2.5, "validation/main/loss": 3, "lr": 1e-5, "iteration": 10},
    {"main/loss": 1.5, "validation/main/loss": 2, "lr": 1e-5, "iteration": 20},
]


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A folder as a trainer leaves it, with a trace and an environment in it."""
    folder = tmp_path / "result"
    folder.mkdir()
    (folder / "log").write_text(json.dumps(LOG))
    found = {"schema": 1, "packages": {"chainer": "7.8.1"}}
    (folder / "env.json").write_text(json.dumps(found))
    write_two(folder / "trace")
    return folder


def reported(*results: Any) -> Path:
    """The page that `chainermn report` writes."""
    file = results[0].parent / "page.html"
    done = invoke("report", *results, "--output", file)
    assert done.exit_code == 0, done.output
    return Path(file)


def refused(*arguments: object) -> str:
    done = invoke("report", *arguments)
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


def test_a_page_has_all_parts_and_needs_no_network(result):
    file = reported(result)
    page = Page(file.read_text())
    parts = "curves timeline operations ranks longest_waits environment"
    assert [*page.sections] == parts.split()
    assert "Others wait most for rank 1 on here" in page.text
    assert re.search(r"allreduce\s+4\s+140 µs", page.sections["operations"])
    assert re.search(r"packages\s+chainer\s+7\.8\.1", page.sections["environment"])
    assert str(result / "env.json") in page.sections["environment"]
    assert not {"src", "href", "action"} & {name for name, _ in page.attributes}
    loads = re.findall(r"https?://[^\s\"']*|url\(|@import|fetch\(", file.read_text())
    # Names.
    assert {*loads} == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}
    assert "content=\"default-src 'none'" in file.read_text()
    assert page.data["timeline"]["complete"]
    assert [chart["name"] for chart in page.data["curves"]["charts"]] == ["loss", "lr"]


def test_a_browser_draws_it(result):
    page = Page(opened(reported(result)))
    assert page.root == {"data-drawn": "yes", "data-rank": "1"}  # the last rank's row
    assert "rank 0 · here" in page.sections["timeline"]
    assert "validation/main/loss" in page.sections["curves"]
    assert page.tags.count("figure") == 2
    assert {"canvas", "path"} <= {*page.tags}
    assert page.sections["longest_waits"].count("show") == 2
    assert "29% waiting" in page.sections["operations"]


def test_foreign_text_stays_text(tmp_path):
    """Hosts, operations, runs and names of values may be anything."""
    log = tmp_path / "log"
    log.write_text(json.dumps([{EVIL: 1.0, "iteration": 1}]))
    made = Made(tmp_path / "trace", 0, 1, host=EVIL).communicator(EVIL, [0])
    made.call(EVIL, 0, 5, sequence=1, communicator=EVIL, error=EVIL).write()
    file = reported(log, tmp_path / "trace")
    page = Page(file.read_text())
    assert page.tags.count("script") == 2
    assert "b" not in page.tags
    assert "\x1b" not in file.read_text()
    drawn = Page(opened(file))
    assert drawn.root == {"data-drawn": "yes", "data-rank": "0"}
    assert "dataset.evil" in drawn.sections["timeline"]


@pytest.mark.parametrize(
    ("given", "missing", "absent"),
    [("log", "not found: a trace", "timeline"), ("trace", "a log of", "curves")],
)
def test_without_a_trace_or_a_log_it_says_so(result, given, missing, absent):
    page = Page(opened(reported(result / given)))
    assert page.root["data-drawn"] == "yes"
    assert missing in page.text
    assert absent not in page.sections


def test_files_may_be_given_one_by_one(result):
    trace = min(result.joinpath("trace").iterdir())
    file = reported(result / "log", result / "env.json", trace)
    assert Page(file.read_text()).data == Page(reported(result).read_text()).data


def test_without_a_file_the_environment_is_that_of_this_machine(result, tmp_path):
    # In a process of its own, since it starts no program any more when it is done.
    done = chainermn("report", result / "log", "--output", tmp_path / "page.html")
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
        ("log", "[1]", "log is not a log of LogReport"),
        ("log", "[" * 100_000, "log of LogReport: maximum recursion"),
        ("log", "5", "log is not a log of LogReport"),
        ("env.json", "[]", "is not what `chainermn env --json` prints"),
        ("trace/x.rank0.json", "[", "doesn't begin as a trace does"),
    ],
)
def test_what_cannot_be_read_is_named(result, name, content, why):
    (result / name).write_text(content)
    assert why in refused(result)


def test_wrong_arguments_are_named(result, tmp_path):
    (tmp_path / "empty").mkdir()
    said = refused(tmp_path / "empty")
    assert "not found: a log of LogReport; not found: a trace" in said
    assert "nowhere can't be read: No such file" in refused(tmp_path / "nowhere")
    (tmp_path / "other").write_text("[]")
    said = refused(result, tmp_path / "other")
    assert "are both a log of LogReport: give one of them" in said
    assert "can't be written" in refused(result, "--output", tmp_path)


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
