"""What the watchdog of `chainermn-comm` reports: calls that wait too long, and for whom."""

import re

from chainermn_tools.explain.rules.rule import ErrorRule, Kind

OURS = "chainermn-comm, watchdog"
CULPRIT = "ChainerMN: likely culprit"
RAN = "chainermn-comm, run on 2 ranks with CHAINERMN_TIMEOUT=3"


def _culprit(does: str) -> re.Pattern[str]:
    """The line of a report that names who is to blame, where that one does this."""
    return re.compile(rf"likely culprits?\b.*?: rank \d+ \(process \d+ on \S+\) {does}")


RULES = (
    ErrorRule(
        name="stalled-rank-elsewhere",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=(CULPRIT,),
        pattern=_culprit("is in no call"),
        examples=(
            "ChainerMN: likely culprit: rank 1 (process 28400 on host0) is in no call for 3.0 s, "
            "after allreduce (collective call 4, 80 bytes).",
            "A call has waited for 3.0 s (CHAINERMN_TIMEOUT):",
        ),
        meaning="The others wait in a call of a communicator, and this rank does something else: "
        "it computes, reads, downloads, or never comes to that call.",
        fix=(
            "read its stack, the first one in the report: that is where it is",
            "if it skips the call: look for an `if comm.rank == ...` or a loop of another length",
            "if it only takes long: export CHAINERMN_TIMEOUT=3600   # longer than that ever takes",
        ),
        source=RAN,
    ),
    ErrorRule(
        name="stalled-rank-stopped",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=(CULPRIT,),
        pattern=_culprit("is stopped"),
        examples=(
            "ChainerMN: likely culprit: rank 1 (process 28535 on host0) is stopped (SIGSTOP or a "
            "debugger) and is in no call for 3.2 s, after allreduce (collective call 4, 80 bytes).",
        ),
        meaning="The rank's process was stopped by a signal, a debugger or a scheduler's suspend, "
        "and the others wait for it.",
        fix=(
            "kill -CONT PROCESS   # on its host; or leave the debugger",
            "under Slurm: scontrol show job $SLURM_JOB_ID   # suspended, or preempted?",
        ),
        source=RAN,
    ),
    ErrorRule(
        name="stalled-rank-gone",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=(CULPRIT,),
        pattern=_culprit("is gone"),
        examples=(
            "ChainerMN: likely culprit: rank 1 (process 32083 on host0) is gone, last seen in "
            "allreduce (collective call 4, 80 bytes).",
        ),
        meaning="The rank's process has ended without the launcher ending the others.",
        fix=(
            "look for what ended it: its last lines, `dmesg | grep -i oom` on its host",
            "under Slurm: srun --kill-on-bad-exit=1 ...",
        ),
        source="chainermn-comm, the monitor asked for a rank that was killed",
    ),
    ErrorRule(
        name="rank-gone",
        kind=Kind.AMBIGUOUS,
        component=OURS,
        literals=(") is gone",),
        pattern=re.compile(r"ChainerMN: rank \d+ \(process \d+ on \S+\) is gone[.,]"),
        examples=(
            "ChainerMN: rank 2 (process 16857 on host0) is gone, last seen in no call, after "
            "allreduce (collective call 4, 80 bytes).",
            "ChainerMN: rank 0 (process 20551 on host0) is gone.",
        ),
        meaning="This rank died first, without a word: it was killed by a signal, or crashed. "
        "The launcher then ended the others, and may name one of them.",
        fix=(
            "dmesg -T | grep -i -E 'oom|killed process|segfault'   # on that host",
            "python -X faulthandler ...   # prints the stack at a crash",
        ),
        source="chainermn-comm, run on 3 ranks of which one got SIGKILL",
    ),
    ErrorRule(
        name="stalled-rank-ended",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=(CULPRIT,),
        pattern=_culprit("has ended"),
        examples=(
            "ChainerMN: likely culprit: rank 1 (process 28683 on host0) has ended and waits in "
            "MPI_Finalize.",
        ),
        meaning="The rank's program is over while the others still call the communicator.",
        fix=(
            "make the number of iterations equal: scatter_dataset gives all ranks equally many "
            "examples",
            "look for a return or sys.exit() that only some ranks come to",
        ),
        source=RAN,
    ),
    ErrorRule(
        name="stalled-ranks-wait-for-one-another",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=(CULPRIT,),
        pattern=_culprit("waits in"),
        examples=(
            "ChainerMN: likely culprits, the likeliest first: rank 1 (process 29070 on host0) "
            "waits in recv_obj (from rank 0, tag 5, collective call 4) for 3.0 s.",
            "ChainerMN: or: rank 0 (process 29069 on host0) waits in bcast (root 1, collective "
            "call 5) for 3.0 s.",
        ),
        meaning="Ranks wait for one another in different calls, or in messages that don't meet.",
        fix=(
            "compare the calls listed: operation, the other rank, tag, communicator",
            "for two ranks that both send first: let one receive first",
        ),
        source=RAN,
    ),
    ErrorRule(
        name="stalled-in-one-call",
        kind=Kind.AMBIGUOUS,
        component=OURS,
        literals=("ChainerMN: all ranks are in the call that waits",),
        examples=(
            "ChainerMN: all ranks are in the call that waits: is the network stuck, or much being "
            "sent?",
        ),
        meaning="Every rank came to the call, and it doesn't end: the wire, or MPI itself.",
        fix=(
            "chainermn doctor --hosts ...   # tests the way between the hosts",
            "another way for MPI: export UCX_TLS=tcp,self; export OMPI_MCA_pml=ob1",
        ),
        source="chainermn-comm, the monitor asked",
    ),
    ErrorRule(
        name="stalled-host-silent",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=("ChainerMN: ranks wait for others that could not be asked",),
        examples=(
            "ChainerMN: ranks wait for others that could not be asked; rank 1 on far didn't answer "
            "(is a link cut, or a machine down?); see the reports of other machines.",
        ),
        meaning="The ranks that are waited for are on a machine that doesn't answer any more, or "
        "whose ports are closed for ours.",
        fix=(
            "ping HOST; ssh HOST true   # the one that is named",
            "open the ports between the hosts: each one's watchdog answers on a free TCP port",
        ),
        source="chainermn-comm, the monitor asked",
    ),
    ErrorRule(
        name="link-cut",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=(" has not answered for ",),
        pattern=re.compile(r"ChainerMN: \S+ has not answered for .*: the link is cut"),
        examples=(
            "ChainerMN: beta has not answered for 20.0 s: the link is cut, or it is down. Ending "
            "the ranks on alpha, which MPI can't do from there.",
        ),
        meaning="Another machine of the job fell silent, and the ranks on this one were ended.",
        fix=(
            "ping HOST   # the one that is named; then its own log",
            "start again from the last checkpoint: chainermn launch --max-restarts 3 ...",
        ),
        source="chainermn-comm, run on two hosts of which one's interface was set down",
    ),
    ErrorRule(
        name="link-silent",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=("ChainerMN: nothing was heard of ",),
        pattern=re.compile(r"ChainerMN: nothing was heard of \S+ for .*: the link is cut"),
        examples=(
            "ChainerMN: nothing was heard of beta for 20.0 s: the link is cut, or it is down. The "
            "ranks go on waiting. CHAINERMN_TIMEOUT=600 would end the job; 0 switches these "
            "reports off.",
        ),
        meaning="Another machine of the job fell silent. MPI doesn't notice, so the job may hang.",
        fix=(
            "ping HOST   # the one that is named; then its own log",
            "end the job, and start again from the last checkpoint",
            "CHAINERMN_TIMEOUT=600   # has such a job ended, by the watchdog",
        ),
        source="chainermn-comm, run on two hosts of which one's interface was set down",
    ),
    ErrorRule(
        name="waiting-for-long",
        kind=Kind.WARNING,
        component=OURS,
        literals=("A report follows at ",),
        pattern=re.compile(r"ChainerMN: rank \d+ has waited .*\. A report follows at "),
        examples=(
            "ChainerMN: rank 0 has waited 1.7 s in bcast (root 1, collective call 5); rank 1 "
            "(process 28400 on host0) is in no call for 1.7 s, after allreduce (collective call "
            "4, 80 bytes). A report follows at 3.0 s.",
        ),
        meaning="A call has waited for half of CHAINERMN_TIMEOUT. By itself that is no failure: "
        "one rank may download or evaluate.",
        fix=("if it is expected: export CHAINERMN_TIMEOUT=3600   # or unset it",),
        source=RAN,
    ),
    ErrorRule(
        name="no-watchdog",
        kind=Kind.WARNING,
        component=OURS,
        literals=("calls that wait too long won't be reported: ",),
        examples=(
            "RuntimeWarning: calls that wait too long won't be reported: their monitor ended with "
            "status 1",
        ),
        meaning="The process that watches a machine's ranks could not be started there.",
        fix=(
            "look at what follows the colon; the monitor needs to see the ranks in /proc",
            "to do without: export CHAINERMN_TIMEOUT=0",
        ),
        source="chainermn-comm, run with a monitor that can't start",
    ),
    ErrorRule(
        name="bad-timeout",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=("CHAINERMN_TIMEOUT must be the seconds",),
        examples=(
            "ValueError: CHAINERMN_TIMEOUT must be the seconds that a call may wait before the "
            "job is ended, from 1 to 1e+09, or 0 for no limit, got 'soon'; unset it for a report "
            "after 600 s and no end",
        ),
        meaning="The variable holds something that is no such number.",
        fix=("unset CHAINERMN_TIMEOUT   # or e.g. export CHAINERMN_TIMEOUT=1800",),
        source="chainermn-comm",
    ),
)
