"""Checks of the way to each host: its name, its key, and a login without a password."""

from __future__ import annotations

from collections.abc import Collection

from chainermn_tools.doctor.check import Answer, Context, failed, ok, skipped
from chainermn_tools.doctor.hosts.round import Round, over_hosts
from chainermn_tools.doctor.hosts.ssh import Kind
from chainermn_tools.doctor.hosts.wording import all_of, told

NAME_KINDS: tuple[Kind, ...] = ("unknown name",)
KEY_KINDS: tuple[Kind, ...] = ("unknown host key", "changed host key")
# What is wrong, and what to do about it.
MEANING: dict[Kind, tuple[str, str]] = {
    "unknown name": (
        "nobody knows this name",
        "write the host's address, or add a line to /etc/hosts: ADDRESS {host}",
    ),
    "unreachable": (
        "there is no way to it, or it is down",
        "ping {host}   # and see that the host runs, and that no firewall drops port 22",
    ),
    "refused": (
        "it refuses the connection: no ssh server listens there",
        "sudo systemctl start ssh   # on {host}; or put its port into ~/.ssh/config",
    ),
    "closed": (
        "its ssh server closes the connection before the login",
        "sudo journalctl -u ssh   # on {host}, which says why: MaxStartups, a blocked address",
    ),
    "unknown host key": (
        "ssh doesn't know its key yet, and would ask",
        "ssh {host}   # once, and answer yes if the fingerprint is right",
    ),
    "changed host key": (
        "its key is not the one that ssh knows",
        "ssh-keygen -R {host}   # if the host was installed anew, and else find out who answers",
    ),
    "no key": (
        "it wants a key, and ssh has none to offer",
        "ssh-keygen -t ed25519 && ssh-copy-id {host}",
    ),
    "refused key": (
        "it takes none of the keys that ssh offers",
        "ssh-copy-id {host}",
    ),
    "no answer": (
        "ssh gets no answer in time",
        "ssh -v {host} true   # shows where it waits",
    ),
    "no shell": (
        "the login succeeds, but what runs there gives no answer in time",
        "ssh {host} true   # if it doesn't end, see ~/.bashrc there and what it waits for",
    ),
    "no ssh": (
        "ssh can't be started here",
        "sudo apt-get install openssh-client   # or what HYDRA_LAUNCHER_EXEC names",
    ),
}


@over_hosts("host names", "Are the hosts' names known?")
def host_names(_: Context, round_: Round) -> Answer:
    return _judged(round_, NAME_KINDS, "they are known")


@over_hosts("host keys", "Does ssh know the hosts' keys?")
def host_keys(_: Context, round_: Round) -> Answer:
    return _judged(round_, KEY_KINDS, "the keys are known")


@over_hosts("ssh", "Can one log in to each host without a password, as mpiexec does?")
def login(_: Context, round_: Round) -> Answer:
    kinds = MEANING.keys() - {*NAME_KINDS, *KEY_KINDS}
    return _judged(round_, kinds, "they let us in")


def _judged(round_: Round, kinds: Collection[str], well: str) -> Answer:
    """The answer about one stage of a login; of hosts that fail at another it says nothing."""
    replies = round_.hosts
    mine = {h: r.trouble for h, r in replies.items() if r.trouble and r.trouble.kind in kinds}
    if mine:
        first = next(iter(mine))
        _, fix = MEANING[mine[first].kind]
        text = told({host: MEANING[one.kind][0] for host, one in mine.items()})
        if mine[first].said:
            text += f" (of {first}: {mine[first].said})"
        by_host = {host: one.kind for host, one in mine.items()}
        return failed(text, fix.format(host=first), hosts=by_host)
    passed = [host for host, reply in replies.items() if reply.trouble is None]
    if not passed:
        return skipped("no host was reached")
    return ok(f"{all_of(passed)}: {well}")
