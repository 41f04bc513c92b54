"""What each rank of a launched job says at its end."""

from __future__ import annotations

import json
import os

import pytest

from chainermn_tools.launch import rank


class Said(list):
    def say(self, **record):
        self.append(record)


def test_a_process_that_a_rank_forked_says_no_goodbye():
    voice = Said()
    rank._say_goodbye(voice, os.getpid() + 1)
    assert voice == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SystemExit(None), 0),
        (SystemExit(0), 0),
        (SystemExit(3), 3),
        (SystemExit(256), 1),
        (SystemExit("text"), 1),
        (KeyboardInterrupt(), 130),
        (ValueError(), 1),
    ],
)
def test_status_is_what_python_ends_with(error, status):
    assert rank._status(error) == status


def test_an_error_without_a_text_is_still_described():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    assert "Mute" in rank._described(Mute())["what"]
    assert rank._described(ValueError("first\nsecond"))["what"] == "ValueError: first"
    assert len(json.dumps(rank._described(ValueError("x" * 100_000)))) < 30_000
