"""`chainermn report`: one file that a browser shows. No MPI."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.jobs.commands import chainermn, invoke
from tests.support.tools.traces import Made, write_many, write_two
from tests.tools.browser import opened
from tests.tools.pages import Page

# More than a parser nests.
DEEP = "[" * 100_000
EVIL = '</script><script>document.documentElement.dataset.evil="yes"</script><b>&amp;\x1b"\'<!--'
LOG = """[
    {"main/loss": 2.5, "validation/main/loss": 3, "lr": 1e-5, "iteration": 10},
    {"main/loss": 1.5, "validation/main/loss": 2, "lr": 1e-5, "iteration": 20}
]"""


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A folder as a trainer leaves it, with a trace and an environment in it."""
    folder = tmp_path / "result"
    folder.mkdir()
    (folder / "log").write_text(LOG)
    (folder / "env.json").write_text('{"schema": 1, "packages": {"chainer": "7.8.1"}}')
    write_two(folder / "trace")
    return folder


def reported(*results: Path) -> Path:
    """The page that `chainermn report` writes."""
    file = results[0].parent / "page.html"
    done = invoke("report", *results, "--output", file)
    assert done.exit_code == 0, done.output
    return file


def refused(*arguments: object) -> str:
    done = invoke("report", *arguments)
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("given", ["", "log,env.json,trace"])
def test_a_page_of_a_folder_or_files_has_all_parts_and_needs_no_network(result, given):
    text = reported(*[result / name for name in given.split(",")]).read_text()
    page = Page(text)
    parts = "curves timeline operations ranks longest_waits environment"
    assert [*page.sections] == parts.split()
    assert "Others wait most for rank 1 on here" in page.text
    assert re.search(r"allreduce\s+4\s+140 µs", page.sections["operations"])
    assert re.search(r"packages\s+chainer\s+7\.8\.1", page.sections["environment"])
    assert str(result / "env.json") in page.sections["environment"]
    assert page.attributes.keys().isdisjoint(["src", "href", "action"])
    loads = re.findall(r"https?://[^\s\"']*|url\(|@import|fetch\(", text)
    # Names.
    assert {*loads} == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}
    assert "content=\"default-src 'none'" in text
    assert page.data["timeline"]["complete"]
    assert [chart["name"] for chart in page.data["curves"]["charts"]] == ["loss", "lr"]


def test_a_browser_draws_it(result):
    page = Page(opened(reported(result)))
    assert page.drawn == "1"
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
    page = Page(opened(file))
    assert page.drawn == "0"
    assert "data-evil" not in page.attributes
    assert "dataset.evil" in page.sections["timeline"]


def test_a_log_alone_is_shown(result):
    page = Page(opened(reported(result / "log")))
    assert page.drawn is None
    assert "not found: a trace" in page.text
    assert "timeline" not in page.sections


def test_a_trace_without_calls_is_shown_alone(tmp_path):
    Made(tmp_path / "trace", 0, 1).write()
    page = Page(opened(reported(tmp_path / "trace")))
    assert page.drawn == "0"
    assert "not found: a log of" in page.text
    assert "curves" not in page.sections


def test_without_a_file_the_environment_is_that_of_this_machine(result, tmp_path):
    # In a process of its own, since it starts no program any more when it is done.
    done = chainermn("report", result / "log", "--output", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    text = Page((tmp_path / "page.html").read_text()).sections["environment"]
    assert "where this page was made" in text
    assert "chainermn-tools" in text


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("log", "[", "log is not a log of LogReport, or only a part of it"),
        ("log", "\n", "log is empty"),
        ("log", "[1]", "log is not a log of LogReport"),
        pytest.param(
            "log", DEEP, "or only a part of it: its JSON is damaged", id="deep"
        ),
        ("log", "5", "log is not a log of LogReport"),
        ("env.json", "{", "is not what `chainermn env --json` prints"),
        ("trace/x.rank0.json", "[", "doesn't begin as a trace does"),
    ],
)
def test_what_cannot_be_read_is_named_beside_the_rest(result, name, content, why):
    (result / name).write_text(content)
    assert why in Page(reported(result).read_text()).text
    assert why in refused(result / name)


def test_wrong_arguments_are_named(result, tmp_path):
    (tmp_path / "empty").mkdir()
    said = refused(tmp_path / "empty")
    assert (
        f"in {tmp_path / 'empty'}: not found: a log of LogReport; not found: a trace"
        in said
    )
    assert "nowhere can't be read: No such file" in refused(tmp_path / "nowhere")
    (tmp_path / "other").write_text("[]")
    said = refused(result, tmp_path / "other")
    assert "are both a log of LogReport: give one of them" in said
    assert "can't be written" in refused(result, "--output", tmp_path)


@pytest.mark.parametrize(
    "calls", [24_000, pytest.param(1_000_000, marks=pytest.mark.full)]
)
def test_a_long_trace_makes_a_page_that_a_browser_can_open(tmp_path, calls):
    """Time-outs of the browser, and the page's size, don't grow with the trace."""
    write_many(tmp_path / "trace", ranks=8, calls=calls)
    file = reported(tmp_path / "trace")
    assert file.stat().st_size < 2_000_000
    found = Page(file.read_text()).data["timeline"]
    assert not found["complete"]
    assert len(found["calls"]["row"]) == 20_000
    assert Page(opened(file)).drawn == "7"
