"""Draw the figures of the README and the docs from the schedule itself: python docs/figures/draw.py."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

import ringflash as rf

HERE = Path(__file__).resolve().parent
RANKS, LENGTH = 4, 32
COLOURS = ["#2f6db5", "#e0812b", "#3c9a5f", "#b5457a"]
PAPER, INK = "#f4f4f1", "#333333"
DOCUMENTS = rf.Documents([5, 13, 4, 10], causal=True)
LAYOUTS = {"Contiguous": rf.Contiguous(), "Zigzag": rf.Zigzag(), "Striped": rf.Striped()}


MASKS = {
    "Full()": rf.Full(),
    "Causal()": rf.Causal(),
    "Window(3, 0)": rf.Window(3, 0),
    "Documents([4, 5, 3])": rf.Documents([4, 5, 3], causal=True),
    "Prefix(5)": rf.Prefix(5),
    "Chunked(4)": rf.Chunked(4),
    "Padding.right(8)": rf.Padding.right(8, length=12),
    "FirstKeys(2) & Causal()\n| Window(2, 0)": rf.FirstKeys(2) & rf.Causal() | rf.Window(2, 0),
}
CROSS = {"5 queries, 12 keys": (5, 12), "12 queries, 5 keys": (12, 5)}


def seen_by(mask: rf.Mask | rf.Union, queries: int, keys: int) -> np.ndarray:
    """Who sees whom, from the bounds of the mask's parts."""
    seen = np.zeros((queries, keys), dtype=bool)
    for part in mask.parts if isinstance(mask, rf.Union) else (mask,):
        lo, hi = (end[0].numpy()[:, None] for end in part.bounds(torch.arange(queries) + keys - queries))
        column = np.arange(keys)
        seen |= (lo <= column) & (column < hi)
    return seen


def owners(layout: rf.Layout) -> np.ndarray:
    """Which rank holds each position."""
    owner = np.zeros(LENGTH, dtype=int)
    for rank in range(RANKS):
        owner[layout.positions(LENGTH, rank, RANKS).numpy()] = rank
    return owner


def paint(seen: np.ndarray, row_owner: np.ndarray) -> np.ndarray:
    """An image of who sees whom, each row in the colour of the rank that computes it."""
    image = np.ones((*seen.shape, 3)) * to_rgb(PAPER)
    for rank in range(RANKS):
        image[seen & (row_owner == rank)[:, None]] = to_rgb(COLOURS[rank])
    return image


def show(axes: Axes, image: np.ndarray, title: str, ylabel: str = "", xlabel: str = "") -> None:
    axes.imshow(image, interpolation="nearest")
    rows, columns = image.shape[:2]
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_ylabel(ylabel, fontsize=9, color=INK)
    axes.set_xlabel(xlabel, fontsize=9, color=INK)


def layout_mask_plan() -> None:
    """Three layouts; a mask in global positions, coloured by layout; and what rank 1 computes with each source."""
    figure = plt.figure(figsize=(10.5, 8.6), facecolor="white")
    grid = figure.add_gridspec(3, 12, height_ratios=[0.35, 3.0, 2.0], hspace=0.36, wspace=0.9)
    for column, (name, layout) in enumerate(LAYOUTS.items()):
        owner = owners(layout)
        strip = np.array([to_rgb(COLOURS[rank]) for rank in owner])[None].repeat(2, axis=0)
        pairs = rf.plan(DOCUMENTS, layout, LENGTH, 0, RANKS).pairs_per_rank
        balance = max(pairs) / (sum(pairs) / RANKS)
        show(figure.add_subplot(grid[0, 4 * column : 4 * column + 4]), strip, f"layout: {name}")
        show(
            figure.add_subplot(grid[1, 4 * column : 4 * column + 4]),
            paint(seen_by(DOCUMENTS, LENGTH, LENGTH), owner),
            f"mask: 4 documents, causal\nlargest share of work {balance:.2f} x the mean",
            "queries, in order" if column == 0 else "",
            "keys, in order",
        )
    for source in range(RANKS):
        mine = rf.plan(DOCUMENTS, rf.Zigzag(), LENGTH, 1, RANKS)
        bounds = mine[source]
        held = rf.Zigzag().shard_length(LENGTH, source, RANKS)
        columns = torch.arange(bounds.columns)
        seen = np.zeros((bounds.rows, held), dtype=bool)
        inside = (bounds.lo[0][:, None] <= columns) & (columns < bounds.hi[0][:, None])
        seen[:, mine.keys(source)] = inside.numpy()
        title = f"plan: rank 1, source {source}\n" + (f"{bounds.pairs} pairs" if bounds.pairs else "nothing to see")
        show(
            figure.add_subplot(grid[2, 3 * source : 3 * source + 3]),
            paint(seen, np.full(bounds.rows, 1)),
            title,
            "local queries" if source == 0 else "",
            "its keys",
        )
    handles = [plt.Line2D([], [], marker="s", linestyle="", markersize=9, color=c) for c in COLOURS]
    figure.legend(handles, [f"rank {r}" for r in range(RANKS)], loc="lower center", ncols=RANKS, frameon=False)
    figure.savefig(HERE / "layout_mask_plan.png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def draw_masks() -> None:
    """Every kind of mask over 12 tokens, and a causal mask where queries and keys differ in number."""
    figure, axes = plt.subplots(2, 5, figsize=(12, 5.6), facecolor="white", constrained_layout=True)
    pictures = [(name, seen_by(mask, 12, 12)) for name, mask in MASKS.items()]
    pictures += [(f"Causal()\n{name}", seen_by(rf.Causal(), *sizes)) for name, sizes in CROSS.items()]
    for place, (name, seen) in enumerate(pictures):
        labels = ("queries", "keys") if place == 0 else ("", "")
        show(axes.flat[place], paint(seen, np.zeros(seen.shape[0], dtype=int)), name, *labels)
    figure.savefig(HERE / "masks.png", dpi=110)
    plt.close(figure)


def ring() -> None:
    """Four ranks, each holding its queries while keys and values go round."""
    figure, axes = plt.subplots(figsize=(7.2, 3.3), facecolor="white")
    axes.set_xlim(0, 14.4)
    axes.set_ylim(-0.55, 6.1)
    axes.axis("off")
    for hop in range(RANKS):
        y = 4.6 - 1.5 * hop
        axes.text(0.0, y + 0.42, f"hop {hop}", fontsize=10, color=INK, va="center")
        for rank in range(RANKS):
            x = 1.6 + 3.25 * rank
            source = (rank - hop) % RANKS
            axes.add_patch(plt.Rectangle((x, y), 1.0, 0.85, color=COLOURS[rank]))
            axes.add_patch(
                plt.Rectangle((x + 1.15, y), 1.0, 0.85, facecolor="white", edgecolor=COLOURS[source], lw=2.5)
            )
            axes.text(x + 0.5, y + 0.42, "Q", ha="center", va="center", color="white", fontsize=11, weight="bold")
            axes.text(x + 1.65, y + 0.42, "K V", ha="center", va="center", color=COLOURS[source], fontsize=10)
            if hop < RANKS - 1 and rank < RANKS - 1:
                axes.annotate(
                    "", (x + 3.25 + 1.65, y - 0.62), (x + 1.65, y - 0.03),
                    arrowprops={"arrowstyle": "->", "color": COLOURS[source], "lw": 1.3},
                )  # fmt: skip
    for rank in range(RANKS):
        axes.text(1.6 + 3.25 * rank + 1.07, 5.75, f"rank {rank}", ha="center", fontsize=10, color=INK)
    figure.savefig(HERE / "ring.png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def box(axes: Axes, place: tuple[float, float], text: str, owner: int, *, is_home: bool, share: float = 1.0) -> None:
    """What belongs to `owner`: filled where it stays at home, framed where it travels; a sum is filled to its share."""
    (x, y), colour = place, COLOURS[owner]
    axes.add_patch(plt.Rectangle((x, y), 1.0, 0.8, facecolor=colour if is_home else "white", edgecolor=colour, lw=2))
    if not is_home and share < 1.0:
        axes.add_patch(plt.Rectangle((x, y), share, 0.8, facecolor=colour, alpha=0.3, lw=0))
    ink = "white" if is_home else colour
    axes.text(
        x + 0.5, y + 0.4, text, ha="center", va="center", color=ink, fontsize=8.5, weight="bold" if is_home else None
    )


def route(axes: Axes, title: str, home: str, travels: str, sums: str) -> None:
    """One backward: what stays, what visits the others, and the sums that follow it and go home."""
    axes.set_xlim(-0.2, 16.8)
    axes.set_ylim(-0.4, 7.1)
    axes.axis("off")
    axes.set_title(title, fontsize=11, color=INK, loc="left")
    column = [1.9 + 3.85 * rank for rank in range(RANKS)]
    for rank, x in enumerate(column):
        axes.text(x + 1.65, 6.75, f"rank {rank}", ha="center", fontsize=10, color=INK)
    for hop in range(RANKS):
        y = 5.4 - 1.4 * hop
        axes.text(-0.1, y + 0.4, f"hop {hop}", fontsize=10, color=INK, va="center")
        for rank, x in enumerate(column):
            source = (rank - hop) % RANKS
            box(axes, (x, y), home, rank, is_home=True)
            box(axes, (x + 1.15, y), travels, source, is_home=False)
            if hop > 0:
                box(axes, (x + 2.3, y), sums, source, is_home=False, share=hop / RANKS)
            if hop < RANKS - 1 and rank < RANKS - 1:
                arrow = {"arrowstyle": "->", "color": COLOURS[source], "lw": 1.1}
                axes.annotate("", (column[rank + 1] + 1.4, y - 0.58), (x + 1.9, y - 0.03), arrowprops=arrow)
    axes.text(-0.1, 0.2, "home", fontsize=10, color=INK, va="center")
    for rank, x in enumerate(column):
        box(axes, (x + 2.3, -0.2), sums, rank, is_home=True)


def routes() -> None:
    """Both ways through backward: keys travel and the sums of their gradients follow, or queries do."""
    figure, (above, below) = plt.subplots(2, figsize=(9.2, 8.6), facecolor="white", gridspec_kw={"hspace": 0.12})
    route(above, 'route="keys": K and V travel, queries and their gradients stay', "Q dO\ndQ", "K V", "dK\ndV")
    route(below, 'route="queries": Q and dO travel, keys and their gradients stay', "K V\ndK dV", "Q dO", "dQ")
    figure.savefig(HERE / "routes.png", dpi=130, bbox_inches="tight")
    plt.close(figure)


def landing() -> None:
    """What a rank of a zigzag ring sees of all shards, put together again: one sequence, one interval for each query."""
    rank, layout = 1, rf.Zigzag()
    mine = layout.positions(LENGTH, rank, RANKS).numpy()
    seen = seen_by(rf.Causal(), LENGTH, LENGTH)[mine]
    owner, last = owners(layout), int(np.flatnonzero(seen.any(axis=0))[-1]) + 1
    figure = plt.figure(figsize=(9.2, 7.0), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(-7.5, LENGTH + 1)
    axes.set_ylim(-12.6, 11.6)
    axes.axis("off")
    rows = {
        9.5: "shards, on\ntheir ranks",
        3.5: "landed\non rank 1",
        -4.0: "queries of rank 1\nagainst it,\nin one launch",
        -11.0: "dK, dV of others'\nrows leave for\ntheir owners",
    }
    for y, text in rows.items():
        axes.text(-7.3, y, text, fontsize=10, color=INK, va="center")
    for source in range(RANKS):
        start = 8.2 * source
        axes.text(start + 3.5, 10.75, f"rank {source}", ha="center", fontsize=10, color=INK)
        for row, position in enumerate(layout.positions(LENGTH, source, RANKS).tolist()):
            cell(axes, (start + 0.88 * row, 9.0), 0.88, COLOURS[source], is_filled=True)
            if position < last and source != rank:
                line = {"color": COLOURS[source], "lw": 0.7, "alpha": 0.6}
                axes.plot([start + 0.88 * row + 0.44, position + 0.5], [8.9, 4.15], **line)
    for position in range(last):
        cell(axes, (position, 3.0), 1.0, COLOURS[owner[position]], is_filled=owner[position] == rank)
        for row in range(len(mine)):
            colour = COLOURS[owner[position]] if seen[row, position] else PAPER
            cell(axes, (position, -0.5 - row), 1.0, colour, is_filled=True)
        if owner[position] != rank and seen[:, position].any():
            cell(axes, (position, -11.5), 1.0, COLOURS[owner[position]], is_filled=False)
            axes.annotate("", (position + 0.5, -11.55 - 0.95), (position + 0.5, -11.55),
                          arrowprops={"arrowstyle": "->", "color": COLOURS[owner[position]], "lw": 0.9})  # fmt: skip
    for position in range(0, last, 4):
        if owner[position] != rank:
            axes.text(position + 2, 2.05, "flag", fontsize=8, color=COLOURS[owner[position]], ha="center")
    figure.savefig(HERE / "landing.png", dpi=130, bbox_inches="tight")
    plt.close(figure)


def cell(axes: Axes, place: tuple[float, float], width: float, colour: str, *, is_filled: bool) -> None:
    face, edge = (colour, "white") if is_filled else ("white", colour)
    inset = 0.0 if is_filled else 0.08
    corner = (place[0] + inset, place[1] + inset)
    size = (width - 2 * inset, 1.0 - 2 * inset)
    axes.add_patch(plt.Rectangle(corner, *size, facecolor=face, edgecolor=edge, lw=0.8 if is_filled else 1.6))


def draw() -> None:
    layout_mask_plan()
    draw_masks()
    ring()
    routes()
    landing()


if __name__ == "__main__":
    draw()
