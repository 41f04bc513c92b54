"""The learning curves of a log."""

import json

from chainermn_tools.report.curves import MOST_POINTS, curves


def test_values_of_one_name_share_a_chart_and_keep_their_entries():
    log = [
        {"main/loss": 3, "iteration": 10, "epoch": 1, "note": "x"},
        {"main/loss": float("nan"), "iteration": 20, "validation/main/loss": 4.5},
        {"main/loss": 2, "iteration": 30, "ok": True, "huge": 10**400},
    ]
    found, notes = curves(log)
    (chart,) = found["charts"]
    main, validation = chart["series"]
    assert (main["name"], main["x"]) == ("main/loss", [10, 20, 30])
    assert main["y"] == [3, False, 2]
    assert (validation["x"], validation["y"]) == ([20], [4.5])
    assert notes == [
        "huge isn't a finite number in 1 of 1 entries.",
        "main/loss isn't a finite number in 1 of 3 entries.",
        "note isn't a finite number in 1 of 1 entries.",
        "ok isn't a finite number in 1 of 1 entries.",
    ]
    json.dumps(found, allow_nan=False)


def test_long_logs_are_thinned():
    found, _ = curves([{"iteration": n, "v": n} for n in range(3 * MOST_POINTS)])
    x = found["charts"][0]["series"][0]["x"]
    assert (len(x), x[-1]) == (MOST_POINTS, 3 * MOST_POINTS - 1)
