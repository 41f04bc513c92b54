"""The hosts of a job: lists, hostfiles, and which gets how many ranks."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainermn_tools.jobs import hosts
from chainermn_tools.jobs.hosts import Host


def test_slots_of_a_host_that_is_named_again_add_up():
    found = hosts.parse_host_list("a, node-1.lab:2,10.0.0.2, node-1.lab")
    assert found == (Host("a", None), Host("node-1.lab", 3), Host("10.0.0.2", None))


def test_hostfiles_of_both_mpis_say_the_same():
    expected = (Host("host0", 2), Host("host1", 4), Host("host2", None))
    for text in (
        "# it\nhost0:2\n\nhost1:4  # big\nhost2\n",
        "host0 slots=2\nhost1 slots = 4\nhost2",
    ):
        assert hosts.parse_hostfile(text, "f") == expected


BAD = [
    "",
    "a,",
    "a b",
    "-oProxyCommand=x",
    "a:",
    "a:0",
    "a:9999999",
    "a$(x)",
    "ä",
    "a@b",
    ".",
]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_host_is_named(text):
    with pytest.raises(ValueError, match="--hosts"):
        hosts.parse_host_list(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [("a:2\nb:two\n", "'b:two' in f is no"), ("# none\n", "f names no host")],
)
def test_errors_of_a_hostfile_name_it(text, said):
    with pytest.raises(ValueError, match=said):
        hosts.parse_hostfile(text, "f")


@settings(max_examples=200)
@given(st.text(st.sampled_from("ab1.-_:;,' \"$`\\\n#=@/slots"), max_size=16))
def test_any_text_is_hosts_that_are_words_or_an_error(text):
    for parse in (hosts.parse_host_list, lambda text: hosts.parse_hostfile(text, "f")):
        try:
            found = parse(text)
        except ValueError:
            continue
        for host in found:
            assert shlex.quote(host.name) == host.name
            assert not host.name.startswith("-")
            assert host.slots is None or host.slots > 0


@pytest.mark.parametrize(
    ("text", "ranks", "expected"),
    [
        ("a:2,b", None, {"a": 2, "b": 1}),
        ("a,b", 5, {"a": 3, "b": 2}),
        ("a,b,c", 2, {"a": 1, "b": 1}),
        ("a:2,b:2,c", 3, {"a": 2, "b": 1}),
    ],
)
def test_ranks_are_assigned_to_hosts_with_slots_for_them(text, ranks, expected):
    assert hosts.assign_slots(hosts.parse_host_list(text), ranks) == expected


def test_ranks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"5 ranks don't fit: .* -n 4, or write a:3\."):
        hosts.assign_slots(hosts.parse_host_list("a:2,b:2"), 5)
