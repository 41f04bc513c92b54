"""The hosts that schedulers give to a job, as their variables say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chainermn_tools.jobs.allocation import Host, expand_nodes, find_allocation


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("alpha,beta", "alpha beta"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[08-10,2],m", "n08 n09 n10 n2 m"),
        ("r[1-2]n[1,3]-ib,x", "r1n1-ib r1n3-ib r2n1-ib r2n3-ib x"),
    ],
)
def test_slurms_list_of_nodes(text, names):
    assert expand_nodes(text) == names.split()


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z-]*", fullmatch=True),
            st.lists(
                st.tuples(st.integers(0, 200), st.integers(0, 9), st.integers(1, 5))
            ),
        ),
        min_size=1,
    )
)
def test_any_list_of_nodes_names_each_in_its_order(entries):
    """Written here from (first, how many more, width) of each range."""
    texts, names = [], []
    for word, ranges in entries:
        listed = [f"{a:0{width}}-{a + more}" for a, more, width in ranges]
        texts.append(word + (f"[{','.join(listed)}]" if ranges else ""))
        numbers = [
            f"{n:0{width}}" for a, more, width in ranges for n in range(a, a + more + 1)
        ]
        names += [word + number for number in numbers] if ranges else [word]
    assert expand_nodes(",".join(texts)) == names


@given(st.text("n[]1-,0 ", max_size=12))
def test_what_is_no_list_of_nodes_is_refused_and_none_is_without_an_end(text):
    try:
        names = expand_nodes(text)
    except ValueError:
        return
    assert all(set(name).isdisjoint("[],") for name in names)


def test_a_list_of_too_many_nodes_ends():
    assert len(expand_nodes("n[0-99999999999]")) == 10**6


SLURM = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),2"}


def test_slurm_gives_its_tasks_if_their_number_was_asked_for():
    found = find_allocation(SLURM | {"SLURM_NTASKS": "10"})
    assert found == ("Slurm", (Host("n1", 4), Host("n2", 4), Host("n3", 2)))
    # Else they are what fits, such as the cores.
    assert find_allocation(SLURM) == (
        "Slurm",
        tuple(Host(f"n{it}", None) for it in "123"),
    )


def test_other_schedulers_say_it_in_files_and_pairs(tmp_path):
    file = tmp_path / "hosts"
    expected = (Host("a.lab", 2), Host("b.lab", 1))
    file.write_text("a.lab\na.lab\nb.lab:1\n")
    assert find_allocation({"PBS_NODEFILE": str(file)}) == ("PBS", expected)
    pairs = {"LSB_MCPU_HOSTS": "a.lab 2 b.lab 1 "}
    assert find_allocation(pairs) == ("LSF", expected)
    assert find_allocation({"LSB_DJOB_RANKFILE": str(file), **pairs}) == (
        "LSF",
        expected,
    )
    file.write_text("a.lab 2 all.q@a.lab UNDEFINED\nb.lab 1 all.q@b.lab <NULL>\n")
    assert find_allocation({"PE_HOSTFILE": str(file)}) == ("SGE", expected)
    file.write_text("a.lab\t2\tall.q@a.lab\tUNDEFINED\nb.lab \t 1\n")
    assert find_allocation({"PE_HOSTFILE": str(file)}) == ("SGE", expected)
    assert find_allocation({"JOB_ID": "1", "PBS_NODEFILE": ""}) is None


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_NODELIST": "n[1-"},
        {**SLURM, "SLURM_NTASKS": "10", "SLURM_TASKS_PER_NODE": "4(x2)"},
        {**SLURM, "SLURM_NTASKS": "10", "SLURM_TASKS_PER_NODE": "many"},
        {"SLURM_JOB_NODELIST": "-oProxyCommand"},
        {"PBS_NODEFILE": "/no such file"},
        {"LSB_MCPU_HOSTS": "a two"},
    ],
)
def test_what_cannot_be_read_is_named(variables):
    with pytest.raises(
        ValueError, match=f"{next(iter(variables))} can't be read: .*--hosts"
    ):
        find_allocation(variables)


def test_of_two_variables_that_disagree_both_are_named():
    variables = {**SLURM, "SLURM_NTASKS": "10", "SLURM_TASKS_PER_NODE": "4(x2)"}
    said = "SLURM_JOB_NODELIST .*SLURM_TASKS_PER_NODE counts 2 nodes, it names 3"
    with pytest.raises(ValueError, match=said):
        find_allocation(variables)
