"""`chainermn explain`: each rule on real lines, nothing on healthy logs, and its verdicts."""

import io
import json
import re
import subprocess
import tracemalloc

import pytest
from rich.console import Console

from chainermn_tools import explain
from chainermn_tools.explain import ErrorRule, Kind
from tests.support.jobs import commands, runner
from tests.support.jobs.scripts import ROOT
from tests.support.tools.explained import explained, verdict_on

RULES = explain.load_rules()
KINDS = {rule.name: rule.kind for rule in RULES}

HEALTHY = """\
==========================================
Num process (COMM_WORLD): 4
Using hierarchical communicator
epoch       main/loss   validation/main/loss  main/accuracy  validation/main/accuracy  elapsed_time
1           0.224002    0.102322              0.9335         0.9695                    17.1059
     total [###...............................................]  7.33%
    14.432 iters/sec. Estimated time to finish: 0:13:43.260349.
ChainerMN: limited BLAS threads to 2 for each of 4 ranks on 8 cores (set OMP_NUM_THREADS to choose)
Process 0 of 4 on host0, process 1 of 4 on host0, rank 0 of 10
loading 0 of 1
loading 0 of 1
Successfully installed chainer-7.8.1 chainermn-comm-2.0.0 mpich-5.0.2 nvidia-nccl-cu12-2.22.3
Resuming from iteration 1200, the newest checkpoint that is whole on all ranks
host0:2143:2561 [0] NCCL INFO Bootstrap : Using eth0:192.0.2.1<0>
host0:2143:2561 [0] NCCL INFO Connected all rings, comm 0x55d0 nRanks 04 busId 1000 - Init COMPLETE
srun: job 1234 queued and waiting for resources
Warning: Permanently added 'host1' (ED25519) to the list of known hosts.
DeprecationWarning: 'pkg_resources' is deprecated as an API
error: 0.031, test error rate: 0.02, 11 failed examples of 1797
memory: 3.2 GiB of 64 GiB, out of memory events: 0
"""
# What a launcher, a terminal or Windows makes of a line.
PASSED = (
    "[1] {}\n",
    "[1,0]<stderr>: {}\n",
    "\x1b[31m{}\x1b[0m\n",
    "50%|#####     |\r{}\n",
    "2026-11-20 13:00:01 host0 {}\r\n",
    "{}\r",
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_complete_and_comes_first_on_its_real_lines_however_they_were_passed(
    rule: ErrorRule,
):
    assert len(KINDS) == len(RULES)  # names are unique
    assert rule.fix
    assert rule.meaning.endswith(".")
    for literal in rule.literals:
        assert any(rule.find(line) for line in rule.examples if literal in line)
    first, *others = explained("\n".join(rule.examples))
    assert first == rule.name
    # What else these lines show says less.
    telling = (Kind.ROOT_CAUSE, Kind.WARNING)
    assert [name for name in others if KINDS[name] in telling] == []
    for passed in PASSED:
        text = HEALTHY + "".join(map(passed.format, rule.examples)) + HEALTHY
        assert explained(text)[0] == rule.name, passed


@pytest.mark.parametrize(
    "page", ["README.md", "docs/gpu.md", "docs/decisions/abort.md"]
)
def test_a_healthy_log_shows_nothing_and_prose_no_cause(page):
    assert explained(HEALTHY) == []
    names = explained((ROOT / page).read_text())
    assert [name for name in names if KINDS[name] is Kind.ROOT_CAUSE] == []


def trace(error: str, tag: str = "") -> str:
    lines = (
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in <module>',
        error,
    )
    return "".join(f"{tag}{line}\n" for line in lines)


# What MPICH 5.0.2's mpiexec prints where a rank is killed, or ends the job.
KILLED = """\
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 31984 RUNNING AT n1
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
ABORT = (
    "Abort(1) on node 1 (rank 1 in comm 0): "
    "application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1\n"
)
TIME_LIMIT = (
    "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-20T13:00:01 "
    "DUE TO TIME LIMIT ***\n"
)
RETRIED = trace("OSError: retried")
REAL = trace("ValueError: real")
HOOK = "ChainerMN: rank 1 of 2: uncaught ValueError, ending the job.\n"
GONE = "ChainerMN: rank 1 (process 7 on n1) is gone, last seen in bcast.\n"
CHAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"
LAUNCH = "chainermn launch: "
# Lines of ranks 0 and 1 that come in turn.
MIXED = "".join(f"{line}\n[0] noise\n" for line in trace("E: x", "[1] ").splitlines())
SEGFAULT = "Fatal Python error: Segmentation fault"

# Logs with the headline, and the known errors in their order.
LOGS = {
    # Without a verdict of ours, rules alone answer.
    "healthy": (HEALTHY, None, []),
    "caught": (RETRIED + "finished, accuracy 0.98\n", None, []),
    "traceback alone": (REAL, None, []),
    "traceback, time limit": (RETRIED + TIME_LIMIT, None, ["slurm_ended_job"]),
    "traceback, kill": (REAL + KILLED, None, ["killed_by_signal_9", "rank_failed"]),
    "abort alone": (ABORT, None, ["rank_failed"]),
    "echo, warning, cause": (
        ABORT + "UserWarning: cuDNN is not enabled.\nHost key verification failed.\n",
        None,
        ["ssh_host_key", "no_cudnn", "rank_failed"],
    ),
    # With one, what follows from it is left out.
    "hook": (RETRIED + REAL + HOOK + ABORT + KILLED, "rank 1: ValueError: real", []),
    "hook, chained": (RETRIED + CHAIN + REAL + HOOK, "rank 1: ValueError: real", []),
    "hook, message of two lines": (
        trace("ValueError: a\nb") + HOOK,
        "rank 1: ValueError: a",
        [],
    ),
    "hook, no traceback": (HOOK, "rank 1: uncaught ValueError", []),
    "hook, mixed": (
        MIXED + "[1] ChainerMN: rank 1 of 2: uncaught E, ending the job.\n",
        "rank 1: E: x",
        [],
    ),
    "two hooks": (
        HOOK + HOOK.replace("rank 1", "rank 0"),
        "rank 1: uncaught ValueError",
        [],
    ),
    "peer first": (
        "ChainerMN: rank 0 of 2: uncaught PeerError, ending the job.\n" + HOOK,
        "rank 1: uncaught ValueError",
        [],
    ),
    "sys.exit": (
        "ChainerMN: rank 1 of 2: sys.exit(3), ending the job.\n",
        "rank 1: sys.exit(3)",
        [],
    ),
    "gone": (
        GONE + KILLED,
        "rank 1 on n1: is gone, last seen in bcast.",
        ["killed_by_signal_9"],
    ),
    "gone, crash": (
        f"{SEGFAULT}\n{GONE}",
        f"rank 1 on n1: {SEGFAULT}",
        ["segmentation_fault"],
    ),
    "launch": (
        f"{HOOK}{LAUNCH}rank 0 on n0 failed first: KeyError: 1 (exit status 1)\n",
        "rank 0 on n0: KeyError: 1 (exit status 1)",
        [],
    ),
    "restarted": (
        f"{LAUNCH}rank 0 failed first: E (exit status 1)\n{LAUNCH}ended by Ctrl-C\n",
        "the job: ended by Ctrl-C",
        [],
    ),
    "cause beside a verdict": (
        HOOK + TIME_LIMIT,
        "rank 1: uncaught ValueError",
        ["slurm_ended_job"],
    ),
}


@pytest.mark.parametrize("kind", LOGS)
def test_a_log_gives_this_verdict_and_these_known_errors(kind):
    log, headline, names = LOGS[kind]
    findings = explain.search(io.BytesIO(log.encode()))
    assert [match.rule.name for match in findings.matches] == names
    verdict = findings.verdict
    if headline is None:
        assert verdict is None
        return
    assert verdict.headline == headline
    if "Traceback" in log:
        assert verdict.traceback.startswith("Traceback")
        assert "noise" not in verdict.traceback


FAILS = """
import numpy, chainermn_comm
comm = chainermn_comm.create_communicator('naive')
comm.allreduce(numpy.zeros(2 + comm.rank))
"""


def test_a_rank_that_really_fails_is_explained():
    job = runner.run_text(2, FAILS)
    assert explained(job)[0] == "ranks_disagree"
    verdict = verdict_on(job)
    assert verdict.rank == 1
    assert "allreduce on rank 1: ranks disagree on array" in verdict.how
    assert verdict.traceback.splitlines()[-1] == verdict.how


# How the command is used


@pytest.mark.parametrize(
    ("log", "status", "said"),
    [
        ("Host key verification failed.\n", 0, "ssh_host_key: Host key"),
        (HEALTHY, 1, "No known error found. "),
        ("", 1, "No known error found. "),
        (KILLED.splitlines()[0], 0, "All of this only says that something else failed"),
        (HOOK, 0, "rank 1: uncaught ValueError\n  line 1\n  Next step: fix the"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_text_and_exit_status_say_whether_anything_was_found(
    log, status, said, encoding, tmp_path
):
    file = tmp_path / "a log; with 'quotes'"
    file.write_bytes(log.encode(encoding))
    done = commands.invoke("explain", file, COLUMNS="300")
    assert done.exit_code == status
    assert said in done.output
    assert "\x1b" not in done.output
    piped = commands.invoke("explain", stdin=file.read_bytes(), COLUMNS="300")
    assert piped.output == done.output


def test_what_cannot_be_read_is_named(tmp_path):
    for unreadable in (tmp_path / "not there", tmp_path):
        refused = commands.invoke("explain", unreadable)
        assert refused.exit_code == 2
        assert "can't be read" in " ".join(refused.output.split())
    words = [*commands.MODULE, "explain"]
    command = f"exec {subprocess.list2cmdline(words)} <&-"
    closed = commands.run("bash", "-c", command)
    assert closed.returncode == 2
    assert "standard input is closed; name a file" in closed.stderr


def test_json_has_the_verdict_and_the_known_errors():
    done = commands.invoke("explain", "--json", stdin=REAL + HOOK + TIME_LIMIT)
    found = json.loads(done.output)
    assert found["verdict"] == {
        "line": 4,
        "how": "ValueError: real",
        "rank": 1,
        "host": "",
        "traceback": REAL.rstrip("\n"),
        "next_step": "fix the error above; the last line of your own code in it is a.py:1.",
    }
    (known,) = found["known"]
    assert known["id"] == "slurm_ended_job"
    assert known["kind"] == "root_cause"
    assert known["component"] == "slurm"
    assert (known["line"], known["times"]) == (5, 1)
    assert known["text"] == TIME_LIMIT.strip()
    assert isinstance(known["fix"], list)


def on_terminal(width: int, **how) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, **how)
    rules = [rule for rule in RULES if rule.component == "nccl"]
    text = "\n".join(line for rule in rules for line in rule.examples)
    log = f"{REAL}{HOOK}{text}".encode()
    explain.render(explain.search(io.BytesIO(log)), console)
    return file.getvalue().splitlines()


def test_a_terminal_gets_whole_commands_wrapped_sentences_and_colours_if_it_likes():
    lines = on_terminal(40, no_color=True, color_system=None)
    indented = [line for line in lines if line.startswith("    ")]
    assert '      File "a.py", line 1, in <module>' in indented
    assert "    nvidia-smi -L   # start at most so many ranks on a host" in indented
    assert max(len(line) for line in lines if line not in indented) <= 40
    assert any("\x1b[32m" in line for line in on_terminal(100, color_system="standard"))
    refused = "".join(on_terminal(100, color_system="standard", no_color=True))
    assert not re.search(r"\x1b\[3", refused)


# Long logs


@pytest.mark.parametrize("size", [1, 1000, 4000, 4096, 9000])
def test_a_message_after_a_long_line_is_found_with_its_number_and_shown_shortened(size):
    failed = b"Host key verification failed."
    log = b"x" * size + b"\rbar\n" * 400 + failed * 2 + b"\n" + failed + b"." * 2000
    (match,) = explain.search(io.BytesIO(log)).matches
    assert (match.line, match.times) == (401, 2)
    assert failed.decode() in match.text
    assert len(match.text) < 400


MANY_CULPRITS = b"ChainerMN: likely culprit: rank 1 (process 1 on " * 1000


@pytest.mark.parametrize("piece", [b"\0\xff", MANY_CULPRITS], ids=["binary", "text"])
def test_a_long_log_without_ends_of_lines_takes_little_memory_and_time(piece):
    log = io.BytesIO(piece * ((8 << 20) // len(piece)))
    tracemalloc.start()
    explain.search(log)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20
