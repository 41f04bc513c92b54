"""Every communicator over hosts that share neither memory nor anything but a network."""

from __future__ import annotations

import pytest

from tests.support.plugins.pairwise import in_full
from tests.support.worlds.topologies import NAMES

JOB_SECONDS = 300.0  # ends a hang, no more


@pytest.mark.parametrize(
    ("ranks", "alternating"),
    [
        ({"alpha": 2, "beta": 2}, False),
        *in_full(
            ({"alpha": 2, "beta": 2}, True),
            ({"alpha": 2, "beta": 1, "gamma": 1}, False),
            ({"alpha": 2, "beta": 1, "gamma": 1}, True),
            # Nobody shares memory: large arrays are exchanged where they lie.
            ({"alpha": 1, "beta": 1, "gamma": 1}, False),
        ),
    ],
)
def test_each_is_right_and_sends_no_more_than_it_must(cluster, ranks, alternating):
    hosts = [host for host, number in ranks.items() for _ in range(number)]
    if alternating:
        hosts = [*ranks, *(host for host, number in ranks.items() if number > 1)]
    job = cluster.job(
        ranks,
        *("-m", "tests.cluster.every_communicator", *hosts),
        alternating=alternating,
        seconds=JOB_SECONDS,
    )
    assert job.returncode == 0, job
    assert "ChainerMN" not in job.err, job  # such as that shared memory can't be had
    assert job.out.count("RIGHT") == len(NAMES), job  # not single_node, but dummy
