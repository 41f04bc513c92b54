"""Draws what a log says: loss and accuracy, of training and of validation, epoch by epoch."""


def draw(log, path, ranks):
    """Write the picture, of entries if there are any; without matplotlib a line is printed instead.

    Args:
        log: the entries of a LogReport.
        path: of the PNG file.
        ranks: how many trained, for the title.
    """
    if not log:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no curves are drawn: `pip install matplotlib` for them")
        return
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    epochs = [entry["epoch"] for entry in log]
    for panel, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for label, observed in (
            ("training", "main"),
            ("validation", "validation/main"),
        ):
            values = [entry[f"{observed}/{name}"] for entry in log]
            panel.plot(epochs, values, marker="o", markersize=3, label=label)
        panel.set(xlabel="epoch", ylabel=name)
        panel.locator_params(axis="x", integer=True)
        panel.grid(alpha=0.3)
    loss, accuracy = figure.axes
    loss.set_yscale("log")
    loss.yaxis.set_major_formatter("{x:g}")
    noun = "rank" if ranks == 1 else "ranks"
    loss.set_title(f"{ranks} {noun}, {epochs[-1]} epochs", loc="left")
    accuracy.set_title(f"validation accuracy {values[-1]:.3f}", loc="left")
    accuracy.legend(loc="lower right")
    figure.savefig(path)
