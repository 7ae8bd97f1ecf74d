"""The loss as a picture."""

from pathlib import Path


def draw(rows: list[dict], comparison: dict | None, path: Path, *, title: str) -> bool:
    """Training and validation loss by step and, if compared, the one-process run on top and the difference below.

    rows: of metrics.jsonl. comparison: of compare.json. False if matplotlib is not installed and nothing was drawn.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")  # a file, no window
    import matplotlib.pyplot as plt

    panels = 2 if comparison else 1
    figure, axes = plt.subplots(
        panels, 1, figsize=(8, 3.2 + 1.8 * panels), sharex=True, squeeze=False, height_ratios=(3, 1)[:panels],
        layout="constrained",
    )  # fmt: skip
    loss_axis = axes[0, 0]
    ranks = len(rows[-1]["peak_memory_bytes"])
    training = f"training, {ranks} processes" if ranks > 1 else "training, one process"
    loss_axis.plot([row["step"] for row in rows], [row["loss"] for row in rows], color="#4477aa", lw=2, label=training)
    checked = [row for row in rows if "validation_loss" in row]
    loss_axis.plot(
        [row["step"] for row in checked], [row["validation_loss"] for row in checked], "o-", color="#ee6677", ms=4,
        label="validation, held-out files",
    )  # fmt: skip
    loss_axis.set(title=title, ylabel="loss (nats per byte)")

    if comparison:
        loss_axis.plot(
            comparison["steps"], comparison["alone"]["loss"], "--", color="black", lw=1, label="training, one process"
        )
        difference_axis = axes[1, 0]
        # A log axis has no place for an exact 0; the smallest fp32 step of a loss near 1 stands for it.
        differences = [max(value, 1e-7) for value in comparison["difference"]]
        difference_axis.semilogy(comparison["steps"], differences, color="#4477aa", lw=1)
        if comparison["measure"] == "absolute":
            difference_axis.axhline(comparison["tolerance"], color="#cc3311", lw=1, ls=":")
        difference_axis.set(ylabel="|difference|")
    axes[-1, 0].set(xlabel="step")
    loss_axis.legend(frameon=False)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
