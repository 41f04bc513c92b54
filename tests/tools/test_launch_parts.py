"""The parts of `chainermn launch`: hosts, command lines, records, verdicts. No job is started."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chainermn_tools
from chainermn_tools.launch import command_line, hosts, rank, records, verdict
from chainermn_tools.launch.hosts import Host
from chainermn_tools.launch.job import Outcome

MPICH = {"path": "/opt/mpi ch/bin/mpiexec", "vendor": "MPICH", "version": "5.0.2"}
OPEN_MPI = {"path": "/opt/ompi/bin/mpiexec", "vendor": "Open MPI", "version": "5.0.11"}
NASTY = ["", " ", "a b", "'", '"', ";", "$(touch x)", "`touch x`", "*", "-n", "#", "\n", "\\", ":"]
any_word = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [("a", None)]),
        ("a, b", [("a", None), ("b", None)]),
        ("node-1.lab:4,10.0.0.2:2", [("node-1.lab", 4), ("10.0.0.2", 2)]),
        ("a,a,b:2,b", [("a", 2), ("b", 3)]),
    ],
)
def test_hosts_of_a_list(text, expected):
    assert hosts.from_list(text) == tuple(Host(*one) for one in expected)


def test_hostfiles_of_both_mpis_say_the_same():
    mpich = "# the lab\nhost0:2\n\nhost1:4  # the big one\nhost2\n"
    ompi = "host0 slots=2\nhost1 slots = 4 max-slots=8\nhost2\n"
    expected = (Host("host0", 2), Host("host1", 4), Host("host2", None))
    assert hosts.from_file(mpich, "f") == hosts.from_file(ompi, "f") == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", "a b", "-oProxyCommand=x", "a;b", "a:", "a:0", "a:-1", "a:x", "a:9999999"),
        *("'a'", "a$(x)", "a\nb", "host slots=", "a:2 slots=2", "ä", "a@b:c", "."),
    ],
)
def test_what_is_no_host_is_named(text):
    with pytest.raises(ValueError, match="--hosts"):
        hosts.from_list(text)


def test_errors_of_a_hostfile_name_the_line():
    with pytest.raises(ValueError, match=r"line 2 of my file"):
        hosts.from_file("a:2\nb:two\n", "my file")
    with pytest.raises(ValueError, match="names no host"):
        hosts.from_file("# nobody\n", "my file")


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab1.-_:;,' \"$`\\\n#=@/slots"), max_size=16) | any_word)
def test_any_text_is_hosts_that_are_words_or_an_error(text):
    for parse in (hosts.from_list, lambda text: hosts.from_file(text, "f")):
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
        ("a,b", None, {"a": 1, "b": 1}),
        ("a:2,b", None, {"a": 2, "b": 1}),
        ("a,b", 5, {"a": 3, "b": 2}),
        ("a,b,c", 2, {"a": 1, "b": 1}),
        ("a:2,b:2", 3, {"a": 2, "b": 1}),
        ("a:2,b:2", 2, {"a": 2}),
    ],
)
def test_ranks_are_dealt_to_hosts(text, ranks, expected):
    assert hosts.deal(hosts.from_list(text), ranks) == expected


def test_too_many_ranks_for_the_slots_are_refused():
    with pytest.raises(ValueError, match="5 ranks don't fit: the hosts have 4 slots"):
        hosts.deal(hosts.from_list("a:2,b:2"), 5)


def words_of(mpiexec, *arguments, dealt=None, prefix=False, threads=1, script="train.py"):
    names = ["PATH", "PYTHONPATH", "CHAINERMN_LAUNCH", "OMP_NUM_THREADS", "HOME"]
    return command_line.command_line(
        mpiexec, 2, dealt or {}, prefix, threads, names, script, arguments
    )


def test_command_line_of_mpich():
    words = words_of(MPICH, "--epoch", "3", dealt={"a": 1, "b": 1}, prefix=True)
    assert words == [
        *("/opt/mpi ch/bin/mpiexec", "-prepend-rank", "-hosts", "a:1,b:1", "-n", "2"),
        *(sys.executable, "-m", "chainermn_tools.launch.rank", "train.py", "--epoch", "3"),
    ]


def test_command_line_of_open_mpi(monkeypatch):
    monkeypatch.setattr(command_line, "cores", lambda: {"usable": 2})
    ranks = ["-n", "2", sys.executable, "-m", "chainermn_tools.launch.rank", "train.py"]
    assert words_of(OPEN_MPI) == [OPEN_MPI["path"], *ranks]
    monkeypatch.setattr(command_line, "cores", lambda: {"usable": 1})
    assert words_of(OPEN_MPI) == [OPEN_MPI["path"], "--map-by", "slot:OVERSUBSCRIBE", *ranks]
    words = words_of(OPEN_MPI, dealt={"a": 2}, prefix=True, threads=4)
    passed = [words[at + 1] for at, word in enumerate(words) if word == "-x"]
    assert passed == ["CHAINERMN_LAUNCH", "OMP_NUM_THREADS", "PYTHONPATH"]
    assert words[1:5] == ["--output", "tag", "--host", "a:2"]
    assert "none" in words
    assert "--tag-output" in words_of({**OPEN_MPI, "version": "4.1.6"}, prefix=True)


@settings(max_examples=200, deadline=None)
@given(any_word, st.lists(any_word | st.sampled_from(NASTY) | st.from_regex(r"\A\\*:\Z")))
def test_script_and_arguments_stay_single_words_and_no_colon_ends_the_program(script, arguments):
    for mpiexec in (MPICH, OPEN_MPI):
        words = words_of(mpiexec, *arguments, script=script)
        mine = words[words.index(command_line.RANK_MODULE) + 1 :]
        assert ":" not in mine
        assert [command_line.unescape(word) for word in mine] == [script, *arguments]
        assert shlex.split(shlex.join(words)) == words  # as it is printed


SHELLS = ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput")


def test_nothing_in_the_package_asks_a_shell():
    folder = Path(chainermn_tools.__file__).parent
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword):
                assert node.arg != "shell", f"{file}:{node.value.lineno}"
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in SHELLS, f"{file}:{node.lineno}"


def test_threads_divide_the_cores_unless_the_user_chose(monkeypatch):
    monkeypatch.setattr(command_line, "cores", lambda: {"usable": 8})
    for name in command_line.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert command_line.threads_for(2, {}) == 4
    assert command_line.threads_for(3, {}) == 2
    assert command_line.threads_for(20, {}) == 1
    assert command_line.threads_for(6, {"a": 4, "b": 2}) == 2
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    assert command_line.threads_for(2, {}) is None


LAUNCH = "0123abcd"
ranks = st.integers(0, 999)
texts = st.binary(max_size=30).filter(lambda text: b"\x1e" not in text)
contents = st.dictionaries(st.text(max_size=5), st.text(max_size=50) | st.integers(), max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(texts, ranks, contents), max_size=5), texts, st.data())
def test_records_are_taken_out_wherever_the_stream_is_cut(said, last, data):
    stream, shown = b"", b""
    for serial, (text, number, record) in enumerate(said):
        # A rank's tag before a record is the launcher's and goes with it.
        text = text.rstrip(b"] ")
        stream += text + b"".join(records.frames(LAUNCH, number, serial, record))
        shown += text
    reader, got, position = records.Reader(LAUNCH), b"", 0
    stream, shown = stream + b"." + last, shown + b"." + last
    while position < len(stream):
        size = data.draw(st.integers(1, 40))
        got += reader.feed(stream[position : position + size])
        position += size
    got += reader.close()
    assert reader.records == [(number, record) for _, number, record in said]
    assert got.replace(b"\n", b"").replace(b"\r", b"") == shown.replace(b"\n", b"").replace(
        b"\r", b""
    )


@pytest.mark.parametrize("tag", [b"[3] ", b"[1,3]<stderr>: ", b"[prterun-a-1@1,3]<stderr>: "])
def test_the_tag_of_a_record_goes_with_it(tag):
    (frame,) = records.frames(LAUNCH, 3, 0, {"kind": "hello"})
    reader = records.Reader(LAUNCH)
    shown = reader.feed(tag + b"before\n" + tag + frame + tag + b"after\n")
    assert shown == tag + b"before\n" + tag + b"after\n"
    assert reader.records == [(3, {"kind": "hello"})]
    assert records.with_plain_ranks(shown) == b"[3] before\n[3] after\n"


def test_long_records_travel_in_frames_that_a_pipe_keeps_whole():
    record = {"traceback": "x" * 20_000 + "é\x1e\n"}
    frames = records.frames(LAUNCH, 1, 0, record)
    assert len(frames) > 5
    assert max(map(len, frames)) < 4096
    reader = records.Reader(LAUNCH)
    other = records.frames(LAUNCH, 2, 0, {"a": 1})[0]
    assert reader.feed(b"".join([*frames[:3], other, *frames[3:]])) == b""
    assert sorted(reader.records) == [(1, record), (2, {"a": 1})]


@pytest.mark.parametrize("text", [b"[" * 60_000, b"[1," * 20_000, b"\x1e" * 60_000])
def test_output_that_looks_like_tags_or_marks_takes_no_longer(text):
    """Quadratic time would be minutes."""
    reader = records.Reader(LAUNCH)
    assert records.with_plain_ranks(reader.feed(text) + reader.close()) == text


def test_anothers_records_and_a_lone_mark_are_shown():
    (frame,) = records.frames("other", 1, 0, {})
    reader = records.Reader(LAUNCH)
    text = frame + b"\x1e" + b"y" * 5000
    assert reader.feed(text) + reader.close() == text
    assert reader.records == []


def outcome(*said: tuple, status: int = 0, tail: str = "") -> Outcome:
    hellos = [(r, {"kind": "hello", "pid": 100 + r, "host": f"h{r}"}) for r in range(2)]
    return Outcome(status=status, records=[*hellos, *said], tail=tail.encode())


def bye(rank, size=2):
    return rank, {"kind": "goodbye", "size": size}


def failed(rank, what, status=1, echo=False):
    record = {"kind": "failed", "what": what, "status": status, "echo": echo}
    return rank, {**record, "traceback": f"Traceback:\n{what}\n"}


HYDRA = (
    "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
    "=   PID {pid} RUNNING AT h\n=   EXIT CODE: {code}\n=====\n"
)
KILLED = "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
PRTE = "prterun noticed that process rank 1 with PID 7 on node vm exited on\nsignal 9 (Killed).\n"
PRTE_CODE = "   Process name: [prterun-vm-21834@1,1]\n   Exit code:    5\n"


def test_a_job_is_good_when_all_said_goodbye_and_mpiexec_agrees():
    assert verdict.judge(outcome(bye(1), bye(0)), 2) == verdict.Verdict(True, 0)
    assert verdict.judge(outcome(bye(1, None), bye(0, None)), 2).good  # no MPI in the script
    assert not verdict.judge(outcome(bye(1), bye(0), status=1), 2).good


@pytest.mark.parametrize(
    ("one", "status", "text"),
    [
        (outcome(bye(0)), 1, "rank 1 of 2 ended without saying goodbye"),
        (outcome(), 1, "ranks 0, 1 of 2 ended without"),
        (outcome(failed(1, "ValueError: x", 3), status=3), 3, "rank 1 on h1 failed first: ValueE"),
        (outcome(failed(0, "PeerError", echo=True), failed(1, "E: x", 4)), 4, "rank 1 on h1"),
        (outcome(failed(0, "PeerError", echo=True)), 1, "rank 0 on h0 failed first: PeerError"),
        (outcome(tail=HYDRA.format(pid=101, code=9) + KILLED), 137, "rank 1 on h1 .*SIGKILL"),
        (outcome(tail=HYDRA.format(pid=101, code=5)), 5, "rank 1 on h1 failed first: exit st"),
        (outcome(tail=HYDRA.format(pid=999, code=9)), 1, "without saying goodbye"),
        (outcome(tail=PRTE), 137, "rank 1 on h1 failed first: ended by signal 9"),
        (outcome(tail=PRTE_CODE), 5, "rank 1 on h1 failed first: exit status 5"),
        (outcome(failed(0, "PeerError", echo=True), tail=PRTE), 137, "rank 1 on h1"),
        (outcome(failed(0, "E: x", 7), tail=PRTE), 7, "rank 0 on h0 failed first: E: x"),
    ],
)
def test_the_first_rank_that_failed_is_named(one, status, text):
    found = verdict.judge(one, 2)
    assert not found.good
    assert found.again
    assert found.status == status
    assert re.search(text, found.text), found.text


REPORT = """
[0] ChainerMN: likely culprit: rank 1 (process 101 on h1) is stopped (SIGSTOP) for 5.0 s.
[0] A call has waited for 5.0 s (CHAINERMN_TIMEOUT):
[0] {}
"""
CUT = "ChainerMN: h1 has not answered for 20.0 s: the link is cut. Ending the ranks on h0\n"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (REPORT.format("CHAINERMN_TIMEOUT is set: ending the job."), "likely culprit: rank 1 (pro"),
        (CUT, "h1 has not answered for 20.0 s"),
        ("CHAINERMN_TIMEOUT is set: ending the job.", "see its report above"),
    ],
)
def test_of_ranks_that_the_watchdog_ends_none_is_blamed_for_that(said, text):
    found = verdict.judge(outcome(tail=said + HYDRA.format(pid=100, code=15)), 2)
    assert (found.good, found.status) == (False, 15)
    assert found.text.startswith(f"the watchdog ended the job: {text}")


def test_the_rank_that_the_watchdog_saw_dying_first_is_blamed():
    gone = "ChainerMN: rank 1 (process 101 on h1) is gone, last seen in allreduce\n"
    found = verdict.judge(
        outcome(tail=gone + HYDRA.format(pid=100, code=11) + KILLED, status=11), 2
    )
    assert found.text == "rank 1 on h1 failed first: it is gone, last seen in allreduce"
    assert found.status == 11
    found = verdict.judge(outcome(tail=gone + HYDRA.format(pid=101, code=9) + KILLED), 2)
    assert found.text == "rank 1 on h1 failed first: ended by signal 9 (SIGKILL)"


def test_a_rank_that_leaves_by_os_exit_is_blamed_by_its_own_words():
    said = "ChainerMN: rank 1 of 2: os._exit(3) before MPI was finalized, ending the job.\n"
    found = verdict.judge(outcome(tail=said, status=3), 2)
    assert found.text == "rank 1 on h1 failed first: os._exit(3) before MPI was finalized"
    assert found.status == 3


def test_a_rank_that_dies_after_a_report_is_blamed():
    said = REPORT.format("The ranks go on waiting.")
    found = verdict.judge(outcome(tail=said + HYDRA.format(pid=101, code=9) + KILLED), 2)
    assert "rank 1 on h1 failed first" in found.text


def test_ranks_that_are_alone_show_the_wrong_mpiexec_and_arent_started_again():
    found = verdict.judge(outcome(bye(0, 1), bye(0, 1)), 2)
    assert not found.good
    assert not found.again
    assert "not that of mpi4py's MPI" in found.text


def test_where_no_rank_began_starting_again_is_no_use():
    found = verdict.judge(Outcome(status=255), 2)
    assert (found.good, found.again, found.status) == (False, False, 255)
    assert found.text == "no rank began; what mpiexec printed above says why"


def test_where_no_rank_began_what_explain_knows_of_it_is_shown():
    said = b"ssh: Could not resolve hostname far: Name or service not known\nLaunch proxy failed.\n"
    found = verdict.judge(Outcome(status=255, tail=said), 2)
    assert "no rank began. A host was named that this one doesn't know." in found.text
    assert "\n    getent hosts" in found.text


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


def test_records_are_json_objects_without_line_ends():
    (frame,) = records.frames(LAUNCH, 0, 0, {"what": "a\nb"})
    assert frame.count(b"\n") == 1
    assert json.loads(frame.split(b" ", 5)[5].rstrip(b"\x1e\n")) == {"what": "a\nb"}
