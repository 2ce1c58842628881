"""Draw what feeds.py has measured, and print it as a table in Markdown.

python bench/plot.py FEEDS.json PICTURE.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from feeds import BY_HAND, PEERS, label, readable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, metavar="FEEDS.json")
    parser.add_argument("picture", type=Path, metavar="PICTURE.svg")
    options = parser.parse_args()
    found = json.loads(options.results.read_text())
    groups = [group for group in found["groups"] if "bound" in group]
    draw(found, groups, options.picture)
    print(table(groups))


def draw(found: dict[str, Any], groups: list[dict[str, Any]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [
        group
        for group in groups
        if group["group"]["source"] == "minibatches"
        and group["group"]["dtype"] == "float32"
        and not group["group"]["size"]["strided"]
    ]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    names = dict.fromkeys(name for group in rows for name in group["seconds"])
    for name in names:
        if name in ("iterator", "step"):
            continue
        points = [
            (group["nbytes"], group["nbytes"] / group["seconds"][name] / 1e9)
            for group in rows
            if name in group["seconds"]
        ]
        style = {"feed": "o-", "plain": "s-", "link": "k--"}.get(name, "x")
        axes.plot(
            *zip(*points),
            style,
            label=label(name),
            linewidth=2.5 if name == "feed" else 1.2,
        )
    axes.set_xscale("log")
    sizes = [group["nbytes"] for group in rows]
    axes.set_xticks(sizes, [readable(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("a minibatch of float32, in ordinary memory")
    axes.set_ylabel("GB/s")
    device = found["about"].get("device", "no GPU")
    axes.set_title(f"Feeding brainstorm's network from Minibatches ({device})")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(picture)


def table(groups: list[dict[str, Any]]) -> str:
    """Peers are those that a user gets without page-locking memory by hand."""
    peers = {way for _, _, ways in PEERS.values() for way in ways} - {BY_HAND}
    lines = [
        "| minibatches | brainstorm_dbuf | of the bound | quickest peer | "
        "brainstorm alone |",
        "| --- | --- | --- | --- | --- |",
    ]
    for group in groups:
        seconds, nbytes = group["seconds"], group["nbytes"]
        rates = {name: nbytes / s / 1e9 for name, s in seconds.items()}
        plain = f"{rates['plain']:.3g} GB/s" if "plain" in rates else "-"
        peer = max((rate for name, rate in rates.items() if name in peers), default=0)
        best = f"{peer:.3g} GB/s" if peer else ""
        lines.append(
            f"| {group['group']['title']} | {rates['feed']:.3g} GB/s | "
            f"{group['of_bound']['feed']:.2f} ({group['bound']}) | {best} | {plain} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
