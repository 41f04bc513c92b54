"""`chainermn explain`: each row on real lines, and no row on what healthy jobs print."""

import ast
import io
import json
import re
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from chainermn_tools import explain
from chainermn_tools.explain import ErrorRule, Kind
from tests.support.jobs import commands, runner
from tests.support.jobs.scripts import ROOT
from tests.support.tools import doctor
from tests.support.tools.explained import verdict_on

RULES = explain.load_rules()
BY_NAME = {row.name: row for row in RULES}

HEALTHY = """\
==========================================
Num process (COMM_WORLD): 4
Using hierarchical communicator
Num unit: 1000
Num Minibatch-size: 100
epoch       main/loss   validation/main/loss  main/accuracy  validation/main/accuracy  elapsed_time
1           0.224002    0.102322              0.9335         0.9695                    17.1059
     total [###...............................................]  7.33%
this epoch [#################################.................] 66.67%
       100 iter, 0 epoch / 20 epochs
    14.432 iters/sec. Estimated time to finish: 0:13:43.260349.
ChainerMN: limited BLAS threads to 2 for each of 4 ranks on 8 cores (set OMP_NUM_THREADS to choose)
Process 0 of 4 on host0, process 1 of 4 on host0, rank 0 of 10
loading 0 of 1
loading 0 of 1
Collecting numpy<3,>=1.26; Requirement already satisfied: mpi4py in ./venv/lib (4.1.2)
Successfully installed chainer-7.8.1 chainermn-comm-2.0.0 mpich-5.0.2 nvidia-nccl-cu12-2.22.3
Resuming from iteration 1200, the newest checkpoint that is whole on all ranks
[0] main/loss 0.01  [1] main/loss 0.02
host0:2143:2561 [0] NCCL INFO Bootstrap : Using eth0:192.0.2.1<0>
host0:2143:2561 [0] NCCL INFO Connected all rings, comm 0x55d0 nRanks 04 busId 1000 - Init COMPLETE
srun: job 1234 queued and waiting for resources
Warning: Permanently added 'host1' (ED25519) to the list of known hosts.
UserWarning: Accessing a deprecated name; it will be removed in a later release.
DeprecationWarning: 'pkg_resources' is deprecated as an API
error: 0.031, test error rate: 0.02, 11 failed examples of 1797
memory: 3.2 GiB of 64 GiB, out of memory events: 0
"""


def names(text: str | bytes) -> list[str]:
    raw = text if isinstance(text, bytes) else text.encode()
    return [one.rule.name for one in explain.search(io.BytesIO(raw))]


def test_names_are_unique_and_every_row_is_complete():
    assert len(BY_NAME) == len(RULES)
    for row in RULES:
        for texts in (row.literals, row.examples, row.fix):
            assert texts, row.name
            assert isinstance(texts, tuple), row.name
        for text in (row.source, row.component, *row.literals, *row.examples, *row.fix):
            assert isinstance(text, str), row.name
            assert text, row.name
        assert type(row.times) is int, row.name
        assert row.times > 0, row.name
        assert row.meaning.endswith("."), row.name


# What a launcher, a terminal or Windows makes of a line.
PASSED = (
    *(
        "[1] {}\n",
        "[1,0]<stderr>: {}\n",
        "\x1b[31m{}\x1b[0m\n",
        "50%|#####     |\r{}\n",
    ),
    *("2026-11-20 13:00:01 host0 {}\r\n", "{}\r"),
)


@pytest.mark.parametrize("row", RULES, ids=lambda row: row.name)
def test_row_is_recognised_first_on_its_real_lines_however_they_were_passed(
    row: ErrorRule,
):
    found = names("\n".join(row.examples))
    assert found[0] == row.name
    # What else its lines show says less.
    assert all(
        BY_NAME[name].kind in (Kind.AMBIGUOUS, Kind.SECONDARY) for name in found[1:]
    )
    for sign in row.literals:
        meant = [line for line in row.examples if sign in line]
        assert meant, sign
        assert any(row.pattern is None or row.pattern.search(line) for line in meant), (
            sign
        )
    for passed in PASSED:
        text = HEALTHY + "".join(map(passed.format, row.examples)) + HEALTHY
        assert names(text)[0] == row.name, passed


# What the documents of ChainerMN 1.3 show that a user may see, and what today's
# programs print where somebody does as those say; each with the rule that must come
# first.
DOCUMENTED = [
    (
        "mvapich_cma_forbidden",
        """\
[hostxxx:mpi_rank_0][MPIDI_CH3I_SMP_init] CMA is not available. Set MV2_SMP_USE_CMA=0 to disable.
[cli_0]: aborting job:
Fatal error in PMPI_Init_thread:
Other MPI error, error stack:
MPID_Init_thread(514)....:
MPID_Init(365)...........: channel initialization failed
MPIDI_CH3_Init(404)......:
MPIDI_CH3I_SMP_Init(2132): process_vm_readv: Operation not permitted
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
""",
    ),
    (
        "mvapich_segmentation_fault",
        """\
[hostxx:mpi_rank_0][error_sighandler] Caught error: Segmentation fault (signal 11)
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   EXIT CODE: 11
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Segmentation fault (signal 11)
This typically refers to a problem with your application.
""",
    ),
    ("every_rank_prints_0", "host00 0\n" * 4),
    ("every_rank_prints_0", "host00 0\nhost00 0\nhost01 0\nhost01 0\n"),
    (
        "no_nccl_library",
        """\
Traceback (most recent call last):
  File "<string>", line 1, in <module>
ImportError: cannot import name 'nccl'
""",
    ),
    ("no_nccl_library", "ImportError: cannot import name nccl\n"),  # Python 2's
    (
        "no_nccl_library",  # CuPy 13.6.0 and 14.2.0
        """\
UserWarning: \nnccl library could not be loaded.

Reason: ImportError (libnccl.so.2: cannot open shared object file: No such file or directory)

You can install the library by:
  $ pip install "nvidia-nccl-cu12>=2.18.1,<3"
""",
    ),
    (
        "check_cuda_aware_failed",
        "a.out: t.c:24: main: Assertion `err == cudaSuccess' failed.\n",
    ),
    (
        "ssh_host_key",
        """\
The authenticity of host 'host01 (xxx.xxx.xxx.xxx)' can't be established.
ECDSA key fingerprint is SHA256:haGUMcCeC5A8lGh1lpjpWL5dF4xCglZArhhxxxxxxxx.
Are you sure you want to continue connecting (yes/no)?
""",
    ),
    (
        "ssh_host_key",
        "The authenticity of host 'host01 (192.0.2.1)' can't be established.\n",
    ),
    ("ssh_host_key", "Are you sure you want to continue connecting (yes/no)? "),
    (
        "ssh_host_key",
        "Are you sure you want to continue connecting (yes/no/[fingerprint])? ",
    ),
    ("ssh_host_key", "Host key verification failed.\n"),
    ("ssh_permission_denied", "user@host01's password: "),
    (
        "only_naive_on_cpus",
        "Warning: using naive communicator because only naive supports CPU-only execution\n",
    ),
    (
        "rank_failed_with_the_old_hook",
        """\
ValueError: failure!
*****************************************************************************
ChainerMN: Uncaught exception was detected on rank 0. \n\
                Calling MPI_Abort() to shut down MPI processes...
*****************************************************************************
""",
    ),
    ("old_hook_failed", "Sorry, we failed to stop MPI, this MPI process may hang.\n"),
    # MPICH 5.0.2 and Open MPI 5.0.11, started as the documents say for the other.
    (
        "hydra_unknown_option",
        "[mpiexec@host] match_arg (args.c:166): unrecognized argument x\n",
    ),
    (
        "hydra_hostfile_of_open_mpi",
        "[mpiexec@vm] HYDU_process_mfile_token (a.c:301): token cpu not supported at this time\n",
    ),
    (
        "ompi_hostfile_of_mpich",
        "ssh: Could not resolve hostname host00:4: Name or service not known\n",
    ),
    ("main_part_unguarded", "RuntimeError: context has already been set\n"),
    (
        "suspicious_mpiexec",
        "Your environment has PMI_SIZE=2 set, but mpi4py was built with Open MPI.\n",
    ),
]


@pytest.mark.parametrize(("name", "shown"), DOCUMENTED)
def test_what_the_old_documents_show_is_recognised(name, shown):
    assert names(shown)[:1] == [name]
    assert names(HEALTHY + shown + HEALTHY)[:1] == [name]


def test_ranks_that_print_their_own_numbers_are_healthy():
    """As in the old manual, where all is well; lines that count take the same host."""
    assert names("host00 0\nhost00 1\nhost01 2\nhost01 3\n") == []
    assert names("host00 0\nhost01 0\n") == []
    assert names("epoch 0\nepoch 0\nthe layer conv1 0\nthe layer conv1 0\n") == []


@cache
def our_texts() -> set[tuple[str, ...]]:
    """The texts in our sources; of f-strings the parts between what is filled in."""
    found: set[tuple[str, ...]] = set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.add((node.name,))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add((node.value.strip(),))
            elif isinstance(node, ast.JoinedStr):
                parts = (part for part in node.values if isinstance(part, ast.Constant))
                found.add(tuple(str(part.value).strip() for part in parts))
    return found


def words_of_ours(line: str) -> Iterator[str]:
    """The words of a line that stand so in texts of ours which are part of it."""
    for parts in our_texts():
        at = 0
        for part in parts:
            at = line.find(part, at) + len(part)
            if at < len(part):
                break
        else:
            yield from re.findall(r"\w+", " ".join(parts))


@pytest.mark.parametrize(
    "row",
    [row for row in RULES if "chainermn" in row.component],
    ids=lambda row: row.name,
)
def test_rows_of_ours_have_the_texts_that_our_packages_print(row: ErrorRule):
    meant = [
        line for line in row.examples if row.pattern is None or row.pattern.search(line)
    ]
    printed = {word for line in meant for word in words_of_ours(line)}
    pattern = row.pattern.pattern if row.pattern else ""
    # Without `\d` and the like, and what may be absent.
    plain = re.sub(r"\\.|\w\?", " ", pattern)
    assert set(re.findall(r"\w+", " ".join((*row.literals, plain)))) <= printed


def test_a_healthy_log_shows_nothing_and_prose_nothing_but_what_it_quotes():
    """Not even pages about failures: signs are what programs print, not what people say."""
    assert names(HEALTHY) == []
    for page in ("README.md", "docs/gpu.md", "docs/decisions/abort.md"):
        found = names((ROOT / page).read_bytes())
        assert [one for one in found if BY_NAME[one].kind is Kind.ROOT_CAUSE] == []


WORDS = [word for line in HEALTHY.splitlines() for word in line.split()]


@settings(max_examples=50)
@given(
    st.lists(
        st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=12), max_size=12
    )
)
def test_words_of_healthy_logs_in_any_order_show_nothing(lines):
    # Two rows count "rank 0 of 1" or "host0 0" lines, which such words can well make.
    found = names(
        "\n".join(" ".join(line) for line in lines).encode("utf8", "surrogatepass")
    )
    assert set(found) <= {"mpiexec_of_another_mpi", "every_rank_prints_0"}


@settings(max_examples=50)
@given(st.binary(max_size=300), st.sampled_from(RULES), st.binary(max_size=300))
def test_binary_around_a_message_is_harmless(before, row, after):
    text = before + b"\n" + "\n".join(row.examples).encode() + b"\n" + after
    found = explain.search(io.BytesIO(text))
    (mine,) = (one for one in found if one.rule is row)
    assert mine.text.isprintable()


def test_causes_come_before_general_ones_and_echoes_last():
    kinds = (Kind.SECONDARY, Kind.WARNING, Kind.AMBIGUOUS, Kind.ROOT_CAUSE)
    rows = [next(row for row in RULES if row.kind is kind) for kind in kinds]
    text = "\n".join(line for row in rows for line in row.examples)
    assert names(text) == [row.name for row in reversed(rows)]


def on_terminal(width: int, **how) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, **how)
    text = "\n".join(line for row in RULES for line in row.examples).encode()
    verdict = explain.Verdict(
        7, "is gone, " + "last seen " * 9, 1, "host0", "a stack\n  of frames"
    )
    explain.render(explain.search(io.BytesIO(text)), verdict, console)
    return file.getvalue().splitlines()


def test_a_terminal_gets_whole_commands_wrapped_sentences_and_colours_if_it_likes():
    fixes = {f"    {fix}" for row in RULES for fix in row.fix} | {
        "    a stack",
        "      of frames",
    }
    lines = on_terminal(40, no_color=True, color_system=None)
    assert fixes <= set(lines)
    assert max(len(line) for line in lines if line not in fixes) <= 40
    assert any("\x1b[32m" in line for line in on_terminal(100, color_system="standard"))
    refused = "".join(on_terminal(100, color_system="standard", no_color=True))
    assert "\x1b[3" not in refused


def test_exit_status_says_whether_something_was_recognised(tmp_path):
    log = tmp_path / "a log; with 'quotes'"
    log.write_bytes(b"\xff\xfe\0 Host key verification failed.\n")
    done = commands.chainermn("explain", log)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ssh_host_key: ")
    assert "\x1b" not in done.stdout
    healthy = commands.invoke("explain", stdin=HEALTHY)
    assert healthy.exit_code == 1
    assert "Nothing" in healthy.output
    assert (
        commands.invoke("explain", "-", stdin="Host key verification failed.").exit_code
        == 0
    )
    for unreadable in (tmp_path / "not there", tmp_path):
        refused = commands.invoke("explain", unreadable)
        assert refused.exit_code == 2
        assert "can't be read" in " ".join(refused.output.split())


def test_echoes_alone_are_said_to_explain_nothing():
    echo = next(row for row in RULES if row.kind is Kind.SECONDARY)
    done = commands.invoke("explain", stdin="\n".join(echo.examples), COLUMNS="300")
    assert done.exit_code == 0
    assert "only says that something else failed" in done.output.splitlines()[-1]


FAILS = """
import numpy, chainermn_comm
comm = chainermn_comm.create_communicator('naive')
comm.allreduce(numpy.zeros(2 + comm.rank))
"""


def test_a_rank_that_really_fails_is_explained():
    job = runner.run_text(2, FAILS)
    found = names(job.out + job.err)
    assert found[0] == "ranks_disagree"
    # MPI's own lines come last, where it got round to printing any before it killed the
    # job.
    shown = [list(Kind).index(BY_NAME[name].kind) for name in found]
    assert shown == sorted(shown)
    verdict = verdict_on(job)
    assert verdict.rank == 1
    assert (
        "RankMismatchError: allreduce on rank 1: ranks disagree on array" in verdict.how
    )
    assert verdict.traceback.splitlines()[-1] == verdict.how


def test_open_mpis_own_report_names_the_rank_where_nobody_else_does():
    said = (
        "prterun noticed that process rank 1 with PID 3738 on node vm exited on\n"
        "signal 11 (Seg).\n"
    )
    verdict = verdict_on("Fatal Python error: Segmentation fault\n" + said)
    assert (verdict.rank, verdict.host) == (1, "vm")
    assert verdict.how == "Fatal Python error: Segmentation fault"
    assert verdict_on(said).how == "is gone"


def trace(error: str, tag: str = "") -> str:
    lines = (
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in <module>',
        error,
    )
    return "".join(f"{tag}{line}\n" for line in lines)


RETRIED = "ERROR:root:going on\n" + trace("OSError: retried") + "epoch 1\n"
WENT_ON = trace("OSError: retried") + "".join(f"epoch {n}\n" for n in range(5))
REAL = trace("ValueError: real")
SRUN = "srun: error: n1: task 1: Exited with exit code 1\n"
TIME_LIMIT = (
    "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-20T13:00:01 "
    "DUE TO TIME LIMIT ***\n"
)
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n"


@pytest.mark.parametrize("begin", [RETRIED, WENT_ON])
@pytest.mark.parametrize(
    "end", ["", TIME_LIMIT, OOM, SRUN.replace("Exited with exit code 1", "Killed")]
)
def test_a_traceback_that_a_program_logs_and_survives_is_not_the_end(begin, end):
    finder = explain.VerdictFinder()
    explain.search(io.BytesIO((begin + end).encode()), finder=finder)
    assert finder.verdict() is None


# What MPICH 5.0.2's mpiexec prints where a rank is killed.
KILLED = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 31984 RUNNING AT n1
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
SEGFAULT = "Fatal Python error: Segmentation fault\n" + KILLED.replace(
    "9\n", "11\n"
).replace("Killed (signal 9)", "Segmentation fault (signal 11)")
TERMINATED = KILLED.replace("Killed (signal 9)", "Terminated (signal 15)")
ABORT = (
    "Abort(1) on node 1 (rank 1 in comm 0): "
    "application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1\n"
)


@pytest.mark.parametrize(
    ("log", "how", "shown"),
    [
        (RETRIED + KILLED, "ended by signal 9 (Killed)", False),
        (
            RETRIED.removesuffix("epoch 1\n") + KILLED,
            "ended by signal 9 (Killed)",
            False,
        ),
        (RETRIED + SEGFAULT, "Fatal Python error: Segmentation fault", False),
        (WENT_ON + KILLED, "ended by signal 9 (Killed)", False),
        (KILLED, "ended by signal 9 (Killed)", False),
        # Caught or not, nothing says.
        (REAL + KILLED, "ended by signal 9 (Killed)", True),
        # As where a rank waits for the others in MPI_Finalize, until somebody ends the
        # job.
        (REAL + TERMINATED, "ValueError: real", True),
        (REAL + ABORT + KILLED, "ValueError: real", True),
        # A run before; the log goes on where the job was started again.
        (KILLED + "epoch 1\n" * 30 + REAL, "ValueError: real", True),
        # A trainer of Chainer's prints the beginning of one, and raises.
        (
            "Exception in main training loop: real\nTraceback (most recent call last):\n"
            '  File "trainer.py", line 343, in run\n    update()\n'
            "Will finalize trainer extensions and updater before reraising the exception.\n"
            + REAL,
            "ValueError: real",
            True,
        ),
    ],
)
def test_a_signal_that_mpiexec_names_is_the_end_and_no_traceback_that_was_caught(
    log, how, shown
):
    verdict = verdict_on(log)
    assert (verdict.how, bool(verdict.traceback)) == (how, shown)


def test_a_kill_is_said_with_its_host_next_step_and_remedies():
    done = commands.invoke("explain", stdin=RETRIED + KILLED, COLUMNS="300")
    assert done.output.startswith("the job on n1: ended by signal 9 (Killed)\n")
    assert "Next step: see `dmesg -T | grep -i killed`" in done.output
    assert "\nkilled_by_signal_9: " in done.output
    assert "retried" not in done.output


@pytest.mark.parametrize(
    ("log", "rank"),
    [
        (trace("E: x") + "flushed\nbye\n", None),
        (trace("E: x", "[1] ") + "[1] flushed\n[0] bye\n", 1),
        (trace("E: x", "[1,2]<stderr>: "), 2),
        (trace("E: x", " 3: ") + " 0: bye\n", 3),
        (trace("E: x") + "flushed\n" + ABORT, 1),
    ],
)
def test_an_exception_that_few_lines_follow_is_named_with_its_rank_if_any_is(log, rank):
    verdict = verdict_on(log)
    assert (verdict.how, verdict.rank) == ("E: x", rank)


def test_mpis_own_line_names_the_rank_that_ended_the_job():
    verdict = verdict_on(ABORT)
    assert (verdict.how, verdict.rank) == ("application called MPI_Abort", 1)
    assert "read what that rank printed before" in verdict.next_step


CHAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"
NOISY = "".join(
    f"{line}[0] noise\n" for line in trace("E: x", "[1] ").splitlines(keepends=True)
)


@pytest.mark.parametrize(
    ("log", "how"),
    [
        (REAL, "ValueError: real"),
        (RETRIED + REAL, "ValueError: real"),
        (RETRIED + REAL + "flushed\n" + SRUN, "ValueError: real"),
        (REAL + trace("ConnectionError: gone") + SRUN, "ValueError: real"),
        (trace("chainermn_comm.errors.PeerError: x") + REAL + SRUN, "ValueError: real"),
        (trace("KeyError: 1") + CHAIN + REAL, "ValueError: real"),
        (
            REAL + trace("KeyError: 1") + CHAIN + trace("E: x") + SRUN,
            "ValueError: real",
        ),
        (NOISY + SRUN, "E: x"),
        (NOISY.replace("[0] noise", "0: noise").replace("[1]", "1:") + SRUN, "E: x"),
    ],
)
def test_the_last_error_of_the_log_is_named_where_no_hook_says_which(log, how):
    verdict = verdict_on(log)
    assert verdict.how == how
    assert verdict.traceback.splitlines()[-1] == how
    assert "noise" not in verdict.traceback


SNAKE = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
# Below these keys are proper names: of distributions, modules, variables, hosts.
PROPER = ("packages", "imports", "variables", "pairs")


def ids_of(found: object) -> Iterator[str]:
    """The ids in what is printed as JSON: all keys, and what finds a row again."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield key
            if key in ("id", "name", "layer", "kind", "status", "because"):
                yield value
            elif key not in PROPER:
                yield from ids_of(value)
    elif isinstance(found, list):
        for one in found:
            yield from ids_of(one)


def test_all_ids_in_json_are_in_snake_case():
    text = "\n".join(line for row in RULES for line in row.examples).encode()
    known = explain.as_dict(explain.search(io.BytesIO(text)), verdict_on(REAL))
    assert len(known["known"]) == len(RULES)
    checks = [check for stage in doctor.STAGES.values() for check in stage]
    assert len(checks) > 40
    printed = json.loads(commands.chainermn("env", "--json").stdout)
    for name in ("python", "topology", "machine", "blas"):
        assert "unavailable" not in printed[name]
    for one in (*ids_of(known), *checks, *ids_of(printed)):
        assert SNAKE.fullmatch(one), one
