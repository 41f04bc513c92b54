"""Sharded steps over hosts that share neither memory nor anything but a network."""

from __future__ import annotations

import pytest

from tests.support.plugins.pairwise import in_full


@pytest.mark.parametrize(
    ("ranks", "alternating"),
    [
        ({"alpha": 2, "beta": 2}, False),
        *in_full(
            ({"alpha": 2, "beta": 1, "gamma": 1}, True),
            ({"alpha": 1, "beta": 1}, False),
        ),
    ],
)
def test_hosts_end_with_the_bits_of_whole_steps(cluster, ranks, alternating):
    script = ("-m", "tests.cluster.sharded_training")
    job = cluster.job(ranks, *script, alternating=alternating)
    assert job.returncode == 0, job
    assert job.out.count("RIGHT") == 1, job
