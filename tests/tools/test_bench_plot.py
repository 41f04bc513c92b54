"""The picture."""

from typing import Any

import pytest

from chainermn_tools.bench import plot
from tests.support.tools.bench import report


@pytest.mark.parametrize("ranks", [1, 2])
def test_picture_has_a_line_for_each_way(tmp_path, ranks, monkeypatch):
    from matplotlib import pyplot as plt
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, *args: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    plot.plot_report(report(ranks), str(tmp_path / "bench.png"))
    image = plt.imread(tmp_path / "bench.png")
    assert min(image.shape[:2]) > 500
    gradients, arrays = drawn[0].axes
    for axes, names in ((gradients, {"flat"}), (arrays, {"bcast"})):
        assert {line.get_label() for line in axes.lines} == {
            *names,
            "copy in own memory",
        }
        assert axes.get_xscale() == axes.get_yscale() == "log"
        assert all(len(line.get_xdata()) == 10 for line in axes.lines)
        assert axes.get_legend() is not None
    assert ("bus" if ranks > 1 else "algorithm") in gradients.get_ylabel()


def test_picture_of_nothing_is_drawn(tmp_path):
    plot.plot_report(report(results=[]), str(tmp_path / "empty.svg"))
    assert (tmp_path / "empty.svg").stat().st_size
