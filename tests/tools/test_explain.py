"""`chainermn explain`: each rule on real lines, nothing on healthy logs, and its verdicts."""

import io
import json
import sys
import tomllib
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chainermn_tools import explain
from chainermn_tools.explain import ErrorRule, Kind
from tests.support.jobs import commands
from tests.support.jobs.scripts import ROOT
from tests.support.tools.jobs import explained, findings_in

RULES = explain.load_rules()
LOGS = tomllib.loads(Path(__file__).with_name("explained.toml").read_text())
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
    for name in explained("\n".join(rule.examples)):
        # What else these lines show says less.
        assert name == rule.name or KINDS[name] not in (Kind.ROOT_CAUSE, Kind.WARNING)
    for passed in PASSED:
        text = HEALTHY + "".join(map(passed.format, rule.examples)) + HEALTHY
        assert explained(text)[0] == rule.name, passed


@pytest.mark.parametrize(
    "page", ["README.md", "docs/gpu.md", "docs/decisions/failures.md"]
)
def test_a_healthy_log_shows_nothing_and_prose_no_cause(page):
    assert explained(HEALTHY) == []
    names = explained((ROOT / page).read_text())
    assert [name for name in names if KINDS[name] is Kind.ROOT_CAUSE] == []


@pytest.mark.parametrize("kind", LOGS)
def test_a_log_gives_this_verdict_and_these_known_errors(kind):
    expected = LOGS[kind]
    findings = findings_in(expected["log"])
    assert [match.rule.name for match in findings.matches] == expected["known"]
    if "headline" not in expected:
        assert findings.verdict is None
        return
    assert findings.verdict.headline == expected["headline"]
    if "Traceback" in expected["log"]:
        assert findings.verdict.traceback.startswith("Traceback")
        assert "noise" not in findings.verdict.traceback


# How the command is used


@pytest.mark.parametrize(
    ("log", "status", "said"),
    [
        ("Host key verification failed.\n", 0, "ssh_host_key: Host key"),
        (HEALTHY, 1, "No known error found; the log has no whole traceback."),
        ("", 1, "The log is empty. "),
        (LOGS["caught"]["log"], 1, "after which the log goes on: OSError: retried"),
        ("\0", 1, "this is no plain text."),
        (LOGS["syntax_error"]["log"], 0, "code in it is a.py:1."),
        (LOGS["abort_alone"]["log"], 0, "Read the first traceback."),
        (LOGS["two_hooks"]["log"], 0, "ValueError\n  line 1\n  Next step: fix the"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le"])
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
    refused = {tmp_path / "not there": "can't be read", tmp_path: "name one file:"}
    for unreadable, said in refused.items():
        done = commands.invoke("explain", unreadable)
        assert done.exit_code == 2
        assert said in " ".join(done.output.split())
    command = f"exec {sys.executable} -m chainermn_tools explain <&-"
    closed = commands.run("bash", "-c", command)
    assert closed.returncode == 2
    assert "standard input is closed; name a file" in closed.stderr


def test_json_has_the_verdict_and_the_known_errors():
    log = LOGS["cause_beside_a_verdict"]["log"]
    found = json.loads(commands.invoke("explain", "--json", stdin=log).output)
    *trace, _, limit = log.splitlines()
    assert found["note"] is None
    assert found["verdict"] == {
        "line": 4,
        "how": "ValueError: real",
        "rank": 1,
        "host": "",
        "traceback": "\n".join(trace),
        "next_step": "fix the error above; the last line of your own code in it is a.py:1.",
    }
    (known,) = found["known"]
    assert known.pop("fix")
    assert known.pop("meaning")
    assert known == {
        "id": "slurm_ended_job",
        "kind": "root_cause",
        "component": "slurm",
        "line": 5,
        "times": 1,
        "text": limit,
    }


def test_json_says_why_nothing_is_known():
    found = json.loads(commands.invoke("explain", "--json").output)
    assert found == {"verdict": None, "known": [], "note": found["note"]}
    assert found["note"].startswith("The log is empty. ")


def on_terminal(width: int, **how: Any) -> list[str]:
    """What a terminal shows of a verdict and NCCL's errors."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, **how)
    examples = ["\n".join(rule.examples) for rule in RULES if rule.component == "nccl"]
    log = "\n".join([LOGS["hook"]["log"], *examples])
    explain.render(findings_in(log), console)
    return file.getvalue().splitlines()


def test_a_terminal_gets_whole_commands_wrapped_sentences_and_colours_if_it_likes():
    lines = on_terminal(40, no_color=True, color_system=None)
    whole = [line for line in lines if line.startswith("    ")]
    assert '      File "a.py", line 1, in <module>' in whole
    assert "    nvidia-smi -L   # start at most so many ranks on a host" in whole
    assert max(len(line) for line in lines if line not in whole) <= 40
    assert "\x1b[32m" in "".join(on_terminal(100, color_system="standard"))


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
