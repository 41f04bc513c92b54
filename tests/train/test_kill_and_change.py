"""A run that is killed at random moments goes on with any number of ranks, to the same end."""

from __future__ import annotations

import json
import random
import re

import pytest
from numpy.testing import assert_allclose

from tests.support.jobs import elastic, runner

pytestmark = pytest.mark.ci

STOP = 120  # iterations: four epochs of 29, and some of the fifth
SIZES = (1, 2, 3, 4)


def run(ranks, out, background, victim=-1, seconds=0.0):
    digits = elastic.digits(out.parent)
    return runner.run(
        ranks, elastic.__file__, digits, out, STOP, background, victim, seconds
    )


def assert_ended(done, expected=None):
    """Return the weights at the end, and the accuracy; they are as expected."""
    assert done.returncode == 0, done
    weights, accuracy = json.loads(re.search(r"^END (.*)$", done.out, re.M)[1])
    assert accuracy > 0.9
    if expected is not None:
        assert_allclose(weights, expected[0], rtol=0, atol=1e-10)
        assert accuracy == expected[1]
    return weights, accuracy


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "background", ["background", pytest.param("at once", marks=FULL)]
)
@pytest.mark.parametrize("moments", [2, pytest.param(100, marks=FULL)])
def test_killed_at_random_moments_and_resumed_by_other_ranks(
    tmp_path, background, moments
):
    draw = random.Random(f"{background} {moments}")
    expected = assert_ended(run(1, tmp_path / "whole", background))
    out = tmp_path / "run"
    reached = 0
    for number in range(moments):
        size = draw.choice(SIZES)
        most = 0.4
        if number % 2:
            most = 0.05
        seconds = draw.uniform(0, most)
        killed = run(size, out, background, draw.randrange(size), seconds)
        (begin,) = re.findall(r"^BEGIN (\d+)", killed.out, re.M)
        assert int(begin) >= reached, (number, size, killed)
        saved = re.findall(r"^SAVED (\d+)", killed.out, re.M)
        reached = max(map(int, [begin, *saved]))
        # It was done before: another run, with other moments.
        if killed.returncode == 0:
            assert_ended(killed, expected)
            out = tmp_path / f"run {number}"
            reached = 0
    assert_ended(run(draw.choice(SIZES), out, background), expected)
    assert {path.name for path in out.iterdir()} <= {"log"}
