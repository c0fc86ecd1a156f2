"""Loss curves as a page that stands alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import plotly.graph_objects as graph
from plotly.colors import qualitative

from benchmarks.time_to_loss.curves import Curve


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """One line per strategy, the mean over seeds, with the range as a band."""
    figure = graph.Figure()
    colors = itertools.cycle(qualitative.Plotly)
    for (strategy, of_seeds), color in zip(curves.items(), colors, strict=False):
        steps = of_seeds[0].steps
        columns = list(zip(*(curve.losses for curve in of_seeds), strict=True))
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        mean = [sum(column) / len(column) for column in columns]
        figure.add_scatter(x=steps, y=mean, name=strategy, mode="lines", legendgroup=strategy, line={"color": color})
        figure.add_scatter(
            x=[*steps, *reversed(steps)],
            y=[*high, *reversed(low)],
            fill="toself",
            opacity=0.15,
            line={"width": 0},
            fillcolor=color,
            legendgroup=strategy,
            showlegend=False,
            hoverinfo="skip",
        )
    figure.update_layout(
        template="plotly_white",
        xaxis_title="optimizer steps",
        yaxis_title="loss on held-out text",
        yaxis_type="log",
        legend={"orientation": "h", "y": -0.2},
        height=700,
        margin={"t": 20},
    )
    figure.write_html(path, include_plotlyjs=True)
