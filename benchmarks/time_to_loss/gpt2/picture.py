"""Loss over training time as a page that stands alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as graph

from benchmarks.time_to_loss.gpt2.job import DDP, Outcome


def draw(outcomes: Sequence[Outcome], link: str, path: Path) -> None:
    """One line per training behind `link`; torch DDP's steps, made in one process, take as long as they do there."""
    timed = [found.step_s for found in outcomes if found.job.contender == DDP and found.job.link == link]
    figure = graph.Figure()
    for found in outcomes:
        job = found.job
        seconds: Sequence[float] = found.seconds
        if not found.losses or job.link not in ("", link):
            continue
        if not job.link:
            if not timed:
                continue
            seconds = [step * timed[-1] for step in found.steps]
        name = f"{job.contender}, rate {job.rate:g}, {job.steps} steps"
        figure.add_scatter(x=list(seconds), y=found.losses, name=name, mode="lines+markers")
    figure.update_layout(
        template="plotly_white",
        xaxis_title=f"training time behind {link} links, s",
        xaxis_type="log",
        yaxis_title="loss on held-out text",
        legend={"orientation": "h", "y": -0.2},
        height=560,
        margin={"t": 20},
    )
    figure.write_html(path, include_plotlyjs=True, config={"displayModeBar": False})
