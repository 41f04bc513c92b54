"""The hosts of a job: lists, hostfiles, and which gets how many ranks."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainermn_tools.jobs import hosts
from chainermn_tools.jobs.hosts import Host

any_word = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)


def test_hosts_of_a_list():
    for text, expected in (
        ("a", [("a", None)]),
        ("a, b", [("a", None), ("b", None)]),
        ("node-1.lab:4,10.0.0.2:2", [("node-1.lab", 4), ("10.0.0.2", 2)]),
        ("a,a,b:2,b", [("a", 2), ("b", 3)]),
    ):
        assert hosts.parse_host_list(text) == tuple(Host(*one) for one in expected)


def test_hostfiles_of_both_mpis_say_the_same():
    mpich = "# the lab\nhost0:2\n\nhost1:4  # the big one\nhost2\n"
    ompi = "host0 slots=2\nhost1 slots = 4 max-slots=8\nhost2\n"
    old = "host0 cpu=2\nhost1 cpus = 4\nhost2\n"
    expected = (Host("host0", 2), Host("host1", 4), Host("host2", None))
    for text in (mpich, ompi, old):
        assert hosts.parse_hostfile(text, "f") == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ",",
            "a,",
            "a b",
            "-oProxyCommand=x",
            "a;b",
            "a:",
            "a:0",
            "a:-1",
            "a:x",
            "a:9999999",
        ),
        *("'a'", "a$(x)", "a\nb", "host slots=", "a:2 slots=2", "ä", "a@b:c", "."),
    ],
)
def test_what_is_no_host_is_named(text):
    with pytest.raises(ValueError, match="--hosts"):
        hosts.parse_host_list(text)


def test_errors_of_a_hostfile_name_the_line():
    with pytest.raises(ValueError, match=r"line 2 of my file"):
        hosts.parse_hostfile("a:2\nb:two\n", "my file")
    with pytest.raises(ValueError, match="names no host"):
        hosts.parse_hostfile("# nobody\n", "my file")


@settings(max_examples=200)
@given(st.text(st.sampled_from("ab1.-_:;,' \"$`\\\n#=@/slots"), max_size=16) | any_word)
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


def test_ranks_are_assigned_to_hosts_with_slots_for_them():
    for text, ranks, expected in (
        ("a,b", None, {"a": 1, "b": 1}),
        ("a:2,b", None, {"a": 2, "b": 1}),
        ("a,b", 5, {"a": 3, "b": 2}),
        ("a,b,c", 2, {"a": 1, "b": 1}),
        ("a:2,b:2", 3, {"a": 2, "b": 1}),
        ("a:2,b:2", 2, {"a": 2}),
    ):
        assert hosts.assign_slots(hosts.parse_host_list(text), ranks) == expected
    with pytest.raises(ValueError, match="5 ranks don't fit: the hosts have 4 slots"):
        hosts.assign_slots(hosts.parse_host_list("a:2,b:2"), 5)
