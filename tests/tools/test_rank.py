"""What each rank of a launched job says at its end."""

import os

import pytest

from chainermn_tools import rank


def test_a_process_that_a_rank_forked_does_not_report_that_it_finished(monkeypatch):
    reported = []
    monkeypatch.setattr(rank, "emit", lambda kind, **fields: reported.append(kind))
    rank._finish(os.getpid() + 1)
    assert reported == []


def test_status_is_what_python_ends_with():
    statuses = {None: 0, 0: 0, 3: 3, 256: 1, "text": 1}
    assert {code: rank._exit_status(SystemExit(code)) for code in statuses} == statuses
    assert rank._exit_status(KeyboardInterrupt()) == 130
    assert rank._exit_status(ValueError()) == 1


def test_an_error_without_a_text_is_still_described():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    assert "Mute" in rank._describe(Mute())["what"]
    assert (
        rank._describe(ValueError("first\nsecond"))["what"]
        == "ValueError: first second"
    )


@pytest.mark.parametrize("name", ["no.such", "email", ".foo"])
def test_a_module_that_cannot_be_run_is_named_in_a_line(name):
    with pytest.raises(SystemExit, match=f"there is no module {name}"):
        rank._check_module(name)


def test_a_rank_that_cannot_write_its_log_says_so_in_a_line():
    with pytest.raises(SystemExit, match=r"/proc/x/rank-0\.log can't be written: No "):
        rank._log_to("/proc/x")
