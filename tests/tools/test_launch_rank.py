"""What each rank of a launched job says at its end."""

import json
import os
from types import SimpleNamespace

from chainermn_tools.launch import rank


def test_a_process_that_a_rank_forked_says_no_goodbye():
    said = []
    rank._say_goodbye(SimpleNamespace(say=lambda **record: said.append(record)), os.getpid() + 1)
    assert said == []


def test_status_is_what_python_ends_with():
    statuses = {None: 0, 0: 0, 3: 3, 256: 1, "text": 1}
    assert {code: rank._status(SystemExit(code)) for code in statuses} == statuses
    assert rank._status(KeyboardInterrupt()) == 130
    assert rank._status(ValueError()) == 1


def test_an_error_without_a_text_is_still_described():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    assert "Mute" in rank._described(Mute())["what"]
    assert rank._described(ValueError("first\nsecond"))["what"] == "ValueError: first"
    assert len(json.dumps(rank._described(ValueError("x" * 100_000)))) < 30_000
