"""What monitors know of a machine goes through a record of fixed length."""

from __future__ import annotations

from ipaddress import ip_address

from hypothesis import given
from hypothesis import strategies as st

from chainermn_comm.watchdog.roster import MOST_ENDPOINTS, MOST_RANKS, RECORD_BYTES, pack, unpack

ADDRESSES = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
ENDPOINTS = st.lists(st.tuples(ADDRESSES, st.integers(1, 65535)), max_size=6)
MACHINES = st.tuples(
    st.text("abc-.9", max_size=64), st.lists(st.integers(0, 2**31 - 1), max_size=20), ENDPOINTS
)


@given(st.lists(MACHINES, min_size=1, max_size=5))
def test_a_record_keeps_the_name_and_the_first_ranks_and_endpoints(machines):
    records = b"".join(pack(*machine) for machine in machines)
    assert len(records) == RECORD_BYTES * len(machines)
    for number, (host, ranks, endpoints) in enumerate(machines):
        found = unpack(records, number)
        assert found.host == host
        assert (found.num_ranks, found.ranks) == (len(ranks), tuple(ranks[:MOST_RANKS]))
        # An address of IPv6 may be written in several ways.
        kept = [(ip_address(address), port) for address, port in found.endpoints]
        sent = [(ip_address(address), port) for address, port in endpoints]
        assert kept == sent[:MOST_ENDPOINTS]


def test_a_machine_is_named_by_its_first_ranks():
    names = [unpack(pack("far", list(range(count)), []), 0).name for count in (1, 2, 8, 9)]
    assert names[:2] == ["rank 0 on far", "ranks 0, 1 on far"]
    assert names[2] == "ranks 0, 1, 2, 3, 4, 5, 6, 7 on far"
    assert names[3] == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... on far"
