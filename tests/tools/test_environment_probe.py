"""Questions that fail, hang or have no answer."""

import sys
import threading

from chainermn_tools.environment import probe


def test_one_probe_that_fails_or_hangs_leaves_the_others():
    never = threading.Event()

    def has_no_answer():
        raise probe.Unavailable("there is none")

    asked = {"good": lambda: 1, "hangs": never.wait, "fails": lambda: 1 / 0}
    asked |= {"exits": lambda: sys.exit(3), "none": has_no_answer}
    found = probe.run_concurrently(asked, timeout=1)
    never.set()
    assert found.pop("good") == 1
    assert [(name, *said.items()) for name, said in found.items()] == [
        ("hangs", ("unavailable", "no answer within 1 s")),
        ("fails", ("unavailable", "ZeroDivisionError: division by zero")),
        ("exits", ("unavailable", "SystemExit: 3")),
        ("none", ("unavailable", "there is none")),
    ]
