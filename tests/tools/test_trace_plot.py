"""The picture of a run."""

import pytest

from chainermn_tools.trace import plot
from tests.support.tools.traces import Made, matched


@pytest.mark.parametrize("ranks", [0, 1, 40])
def test_pictures(tmp_path, ranks, monkeypatch):
    from matplotlib.figure import Figure

    for rank in range(max(1, ranks)):
        made = Made(tmp_path, rank, max(1, ranks)).communicator(
            "0.1", list(range(max(1, ranks)))
        )
        for number in range(20 if ranks else 0):
            start = 1000 * number + 10 * rank
            made.call(
                f"operation {number % 9}", start, 1000 * number + 800, sequence=number
            )
        made.write()
    run, collectives, _ = matched(tmp_path)
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda *args, **how: drawn.append(save(*args, **how) or args[0]),
    )
    plot.plot_run(run, collectives, str(tmp_path / "trace.png"))
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    whole, part = drawn[0].axes
    rows = min(32, max(1, ranks))
    assert len(whole.get_yticks()) == len(part.get_yticks()) == rows
