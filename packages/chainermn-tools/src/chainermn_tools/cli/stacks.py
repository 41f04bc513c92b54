"""`chainermn stacks`."""

from __future__ import annotations

import click


@click.command()
@click.argument("job", type=click.IntRange(1), required=False)
def stacks(job: int | None) -> None:
    """Print the Python stacks of a running job's ranks.

    The job goes on. Ranks with the same stack are shown together. On the job's first
    host the command shows all ranks, and on other hosts only the ranks there. JOB is the
    PID of `chainermn launch`, of mpiexec or of a rank on this host. You can omit JOB if
    only one job runs here. Jobs with one rank aren't shown:

    \b
        chainermn stacks 4711

    Exit status: 0; 1 if the job has ended or doesn't answer; 2 if there is no such job
    here.
    """
    from chainermn_tools import live

    graph = live.ask(live.choose(job), "stacks")
    ranks: dict[str, list[str]] = {}  # by their stacks
    for name in graph.unreachable:
        ranks.setdefault("not seen from here", []).append(name)
    for world, rank in sorted(graph.ranks.items()):
        does = live.in_words(live.activity(graph, rank))
        where = f"rank {world} on {rank.host}, process {rank.pid}: {does}"
        said = rank.stacks or "no stacks came: is it stopped, or in the kernel?"
        ranks.setdefault(said, []).append(where)
    for said, names in ranks.items():
        click.echo("\n".join([*names, said, ""]))
