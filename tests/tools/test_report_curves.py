"""The learning curves of a log."""

import json

from chainermn_tools.report.curves import MOST_CHARTS, MOST_POINTS, curves


def test_values_of_one_name_share_a_chart_and_keep_their_entries():
    log = [
        {"main/loss": 3, "iteration": 10, "epoch": 1},
        {
            "main/loss": float("nan"),
            "iteration": 20,
            "validation/main/loss": 4.5,
            "note": "x",
        },
        {"main/loss": 2, "iteration": 30, "ok": True, "huge": 10**400},
    ]
    found, notes = curves(log)
    assert found["by"] == "iteration"
    (chart,) = found["charts"]
    main, validation = chart["series"]
    assert (main["name"], main["x"], main["y"]) == (
        "main/loss",
        (10, 20, 30),
        (3, False, 2),
    )
    assert (validation["x"], validation["y"]) == ((20,), (4.5,))
    assert notes == [
        "huge has no finite numbers, and no curve.",
        "main/loss isn't a finite number in 1 of 3 entries.",
        "note has no finite numbers, and no curve.",
        "ok has no finite numbers, and no curve.",
    ]
    json.dumps(found, allow_nan=False)


def test_without_iterations_entries_are_counted():
    found, _ = curves([{"loss": 1.0}, {"loss": 2.0, "iteration": 7}])
    assert found["by"] == "entry"
    assert found["charts"][0]["series"][0]["x"] == (1, 2)


def test_long_and_wide_logs_are_thinned():
    log = [
        {"iteration": n, **{f"v{k}": n for k in range(30)}}
        for n in range(3 * MOST_POINTS)
    ]
    found, notes = curves(log)
    assert len(found["charts"]) == MOST_CHARTS
    x = found["charts"][0]["series"][0]["x"]
    assert (len(x), x[-1]) == (MOST_POINTS, 3 * MOST_POINTS - 1)
    assert "The curve of v0 shows one of 3 entries." in notes
    assert f"Learning curves show {MOST_CHARTS} of 30 names of values." in notes
