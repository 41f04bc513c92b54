"""`chainermn stacks`."""

from __future__ import annotations

import click


@click.command()
@click.argument("job", type=int, required=False)
def stacks(job: int | None) -> None:
    """Print the Python stacks of all ranks of a running job, which runs on.

    Run it on a host of the job, the first one to see all ranks. JOB is the PID of
    mpiexec, or of a rank, on this host; without it, the only job here:

    \b
        chainermn stacks 4711

    Exit status: 0; 1 when the job has ended or doesn't answer; 2 when no such job is
    seen here.
    """
    from chainermn_tools import live

    graph = live.ask(live.choose(job), "stacks")
    ranks = {name: "not seen from here" for name in graph.unreachable}
    for world, rank in sorted(graph.ranks.items()):
        does = live.in_words(live.activity(graph, rank))
        where = f"rank {world} on {rank.host}, process {rank.pid}: {does}"
        ranks[where] = rank.stacks or "no stacks came: is it stopped, or in the kernel?"
    for stacks in dict.fromkeys(ranks.values()):
        same = [where for where, its in ranks.items() if its == stacks]
        click.echo("\n".join([*same, stacks, ""]))
