"""How a log is searched: block by block, in little memory."""

import importlib
import io
import tracemalloc
from types import SimpleNamespace

import pytest

from tests.support.tools.explained import VerdictFinder

# The package has a function of that name, too.
module = importlib.import_module("chainermn_tools.explain.search")


def test_a_message_across_blocks_is_found_once_with_its_line(monkeypatch):
    text = (
        b"".join(b"line %d\n" % n for n in range(40))
        + b"Host key verification failed.\n" * 2
    )
    for size in (1, 2, 3, 7, 8, 9, 20, 29, 30, 31, 58, 59, 60, 61, 300, 1000):
        monkeypatch.setattr(module, "BLOCK_BYTES", size)
        monkeypatch.setattr(module, "OVERLAP_BYTES", 40)
        (found,) = module.search(io.BytesIO(text))
        assert (found.times, found.line) == (2, 41)


def test_a_message_in_a_line_that_never_ends_is_found_once(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 100)
    monkeypatch.setattr(module, "OVERLAP_BYTES", 40)
    for shift in range(0, 120, 7):
        text = b"x" * (300 + shift) + b"Host key verification failed." + b"y" * 500
        (found,) = module.search(io.BytesIO(text))
        assert (found.times, found.line) == (1, 1)
        assert "Host key verification failed" in found.text
        assert len(found.text) < 400


FAILURES = b"Host key verification failed." + b"." * 500 + b"\n"


@pytest.mark.parametrize("piece", [b"\0\xff", b"main/loss 0.1\n", FAILURES])
def test_a_long_log_takes_little_memory(piece, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 16)
    # So many bytes without a newline, or lines.
    log = io.BytesIO(piece * ((2 << 20) // len(piece)))
    tracemalloc.start()
    module.search(log)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_patterns_see_no_more_of_a_line_than_messages_have(monkeypatch):
    """Some would take minutes for a line like this."""
    longest = 0

    class Pattern:
        def search(self, text):
            nonlocal longest
            longest = max(longest, len(text))

    row = SimpleNamespace(name="row", literals=("culprit",), pattern=Pattern(), times=1)
    line = b"ChainerMN: likely culprit: rank 1 (process 1 on " * 20_000
    assert module.search(io.BytesIO(line + b"\n" + line), [row]) == []
    assert 0 < longest <= 2 * module.AROUND_BYTES
    # In one line.
    log = io.BytesIO(line[:9600] + b"host) is gone. Host key verification failed.")
    finder = VerdictFinder()
    (found,) = module.search(log, finder=finder)
    assert found.rule.name == "ssh_host_key"
    assert finder.verdict().rank == 1
    assert len(finder.verdict().how) < 2 * module.AROUND_BYTES


@pytest.mark.parametrize("end", [b"", b"\n", b"\r"])
def test_each_byte_is_searched_for_ends_of_lines_a_few_times_at_most(end, monkeypatch):
    """However many literals are in one line, or lines in one block."""
    searched = 0

    class Block(bytes):
        def rfind(self, text, start, end):
            nonlocal searched
            found = super().rfind(text, start, end)
            searched += end - max(start, found)
            return found

    def search_newline(block, start):
        nonlocal searched
        found = newline.search(block, start)
        searched += (found.end() if found else len(block)) - start
        return found

    newline = module.NEWLINE
    monkeypatch.setattr(module, "NEWLINE", SimpleNamespace(search=search_newline))
    block = Block((b"literal" + b"." * 1100 + end) * 100)
    assert len(list(module._lines_with(["literal", "other"], block, 0))) == 100
    assert searched <= 4 * len(block)
