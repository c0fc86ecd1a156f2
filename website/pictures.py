"""The pictures in docs/pictures: `python -m website.pictures` writes them anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from website.drawing import Drawing

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"


def icon() -> Drawing:
    """Two replicas and a short word between them."""
    drawing = Drawing(32, "laconic", width=32)
    drawing.circle(8, 22, 6, "compute")
    drawing.circle(24, 22, 6, "compute")
    drawing.box(11, 4, 10, 8, "wire", radius=2)
    return drawing


def axes() -> Drawing:
    """The four questions of a strategy."""
    drawing = Drawing(232, "A strategy answers four questions: when, with whom, what, in which order")
    rows = (
        ("synchronization", "When do replicas agree?", "bsp, diloco, ssp, ...", "compute"),
        ("architecture", "With whom does a replica average?", "all_reduce, parameter_server, gossip, ...", "good"),
        ("compression", "What goes on the wire?", "none, int8, topk, powersgd, ...", "codec"),
        ("scheduling", "In what order, overlapped with what?", "fusion, priority, dear, ...", "wire"),
    )
    for place, (axis, question, methods, kind) in enumerate(rows):
        top = 4 + 57 * place
        drawing.box(4, top, 118, 48, kind, words=axis)
        drawing.text(130, top + 20, question)
        drawing.text(130, top + 38, methods, "small")
    return drawing


def journey() -> Drawing:
    """The way of one gradient from the backward pass to the optimizer."""
    drawing = Drawing(596, "A gradient's journey from the backward pass to the optimizer")
    left, right, wide = 8, 212, 180
    drawing.text(left + wide / 2, 16, "training thread", "strong", "middle")
    drawing.text(right + wide / 2, 16, "communication thread", "strong", "middle")
    drawing.line((200, 26), (200, 588), kind="dashed")

    def station(x: float, y: float, kind: str, words: str, *notes: str) -> None:
        drawing.box(x, y, wide, 30, kind, words=words)
        for place, note in enumerate(notes):
            drawing.text(x + 2, y + 45 + 14 * place, note, "small")

    station(left, 30, "compute", "1. backward pass", "A parameter's gradient is", "ready; its hook runs.")
    station(left, 118, "compute", "2. bucket", "The hook writes g / n into the", "bucket's flat tensor.")
    station(
        right,
        118,
        "box",
        "3. plan",
        "Full buckets wait for their",
        "turn in the planned order,",
        "the same on every rank.",
    )
    station(
        right,
        224,
        "codec",
        "4. encode",
        "The compressor makes the",
        "payload: fewer bits, fewer",
        "entries or thin matrices.",
    )
    station(
        right,
        330,
        "wire",
        "5. exchange",
        "Sums, gathers or messages",
        "on the group's transport,",
        "which counts every byte.",
    )
    station(right, 436, "codec", "6. decode", "The flat tensor now holds", "the mean over all ranks.")
    station(
        left,
        436,
        "compute",
        "7. .grad",
        ".grad is a view of the flat",
        "tensor: clipping and the",
        "optimizer see the mean.",
    )
    station(left, 542, "compute", "8. optimizer.step()")
    drawing.text(left + wide / 2, 588, "the same update on every rank", "small", "middle")
    middle = left + wide / 2
    drawing.arrow((middle, 94), (middle, 116))
    drawing.arrow((left + wide, 133), (right, 133))
    for top in (197, 303, 409):
        drawing.arrow((right + wide / 2, top), (right + wide / 2, top + 25))
    drawing.arrow((right, 451), (left + wide, 451))
    drawing.arrow((middle, 515), (middle, 540))
    drawing.box(left, 214, wide, 170, "late")
    drawing.text(left + 10, 236, "Meanwhile, the backward", "small")
    drawing.text(left + 10, 252, "pass continues with the", "small")
    drawing.text(left + 10, 268, "layers in front: exchange", "small")
    drawing.text(left + 10, 284, "and computation overlap.", "small")
    drawing.text(left + 10, 314, "Time that the overlap", "small")
    drawing.text(left + 10, 330, "does not hide is exposed", "small")
    drawing.text(left + 10, 346, "communication: the step", "small")
    drawing.text(left + 10, 362, "takes that much longer.", "small")
    return drawing


def schedules() -> Drawing:
    """When each schedule computes and communicates, for a model of four layers."""
    drawing = Drawing(424, "Timelines of the schedules: computation above, exchanges below")
    unit, start = 13.5, 88

    def row(y: float, name: str, bars: list[tuple[float, float, str, str]]) -> None:
        drawing.text(4, y + 26, name, "strong")
        for begin, length, lane, words in bars:
            kind = {"f": "late", "b": "compute", "x": "wire"}[lane]
            drawing.box(start + begin * unit, y + (24 if lane == "x" else 4), length * unit, 16, kind, radius=2)
            if words:
                drawing.text(
                    start + (begin + length / 2) * unit, y + (36 if lane == "x" else 16), words, "small", "middle"
                )

    backward = [(2.0 * place, 2.0, "b", str(4 - place)) for place in range(4)]

    def forward(*begins: float) -> list[tuple[float, float, str, str]]:
        return [(begin, 1.0, "f", str(place + 1)) for place, begin in enumerate(begins)]

    def exchanges(*bars: tuple[float, float, str]) -> list[tuple[float, float, str, str]]:
        return [(begin, length, "x", words) for begin, length, words in bars]

    drawing.text(start, 14, "backward, layer 4 to 1", "small")
    drawing.text(start + 16 * unit, 14, "next forward", "small")
    rows: list[tuple[str, list[tuple[float, float, str, str]]]] = [
        ("sequential", backward + exchanges((8, 8.5, "4 3 2 1")) + forward(16.5, 17.5, 18.5, 19.5)),
        (
            "wfbp",
            backward
            + exchanges((2, 2.6, "4"), (4.6, 2.6, "3"), (7.2, 2.6, "2"), (9.8, 2.6, "1"))
            + forward(12.4, 13.4, 14.4, 15.4),
        ),
        ("fusion", backward + exchanges((4, 4.6, "4 3"), (8.6, 4.6, "2 1")) + forward(13.2, 14.2, 15.2, 16.2)),
        (
            "mg_wfbp",
            backward + exchanges((2, 2.6, "4"), (4.6, 2.6, "3"), (8, 4.6, "2 1")) + forward(12.6, 13.6, 14.6, 15.6),
        ),
        (
            "priority",
            backward
            + exchanges((2, 2.6, "4"), (4.6, 2.6, "3"), (8, 2.6, "1"), (10.6, 2.6, "2"))
            + forward(10.6, 13.2, 14.2, 15.2),
        ),
        (
            "dear",
            backward
            + exchanges(
                (2, 1.4, "4"),
                (4, 1.4, "3"),
                (6, 1.4, "2"),
                (8, 1.4, "1"),
                (9.4, 1.4, "1"),
                (10.8, 1.4, "2"),
                (12.2, 1.4, "3"),
                (13.6, 1.4, "4"),
            )
            + forward(10.8, 12.2, 13.6, 15.0),
        ),
    ]
    for place, (name, bars) in enumerate(rows):
        row(22 + 60 * place, name, bars)
        drawing.line((start, 22 + 60 * place + 50), (396, 22 + 60 * place + 50), kind="dashed")
    legend = (("compute", "backward"), ("late", "forward"), ("wire", "exchange of these layers"))
    place_x = start
    for kind, words in legend:
        drawing.box(place_x, 396, 14, 14, kind, radius=2)
        drawing.text(place_x + 19, 408, words, "small")
        place_x += 30 + 6 * len(words)
    return drawing


def synchronization() -> Drawing:
    """How three replicas meet under three rules."""
    drawing = Drawing(418, "When replicas agree: in every step, after a period, or without a barrier")

    def replicas(y: float, title: str, note: str) -> list[float]:
        drawing.text(4, y, title, "strong")
        drawing.text(4, y + 16, note, "small")
        tops = [y + 26 + 24 * rank for rank in range(3)]
        for rank, top in enumerate(tops):
            drawing.text(4, top + 13, f"rank {rank}", "small")
        return tops

    for top in replicas(16, "bsp", "All ranks exchange gradients in every step."):
        for step in range(6):
            drawing.box(52 + 56 * step, top, 36, 17, "compute", radius=2)
            drawing.box(90 + 56 * step, top, 16, 17, "wire", radius=2)
    for top in replicas(156, "local updates", "Ranks train alone and exchange the change after a period."):
        for step in range(8):
            drawing.box(52 + 36 * step + (20 if step > 3 else 0), top, 33, 17, "compute", radius=2)
        drawing.box(196, top, 17, 17, "wire", radius=2)
        drawing.box(360, top, 17, 17, "wire", radius=2)
    tops = replicas(296, "ssp, asp", "No barrier: a fast rank continues, under ssp up to a limit.")
    for top, length in zip(tops, (30, 34, 62), strict=True):
        x = 52.0
        while x + length + 14 < 396:
            drawing.box(x, top, length, 17, "compute", radius=2)
            drawing.box(x + length + 2, top, 10, 17, "wire", radius=2)
            x += length + 16
    drawing.box(52, 398, 14, 14, "compute", radius=2)
    drawing.text(71, 410, "a step of training", "small")
    drawing.box(190, 398, 14, 14, "wire", radius=2)
    drawing.text(209, 410, "communication", "small")
    return drawing


def architectures() -> Drawing:
    """Who talks to whom."""
    drawing = Drawing(384, "With whom a replica averages: all-reduce, parameter server, gossip, shards")

    def around(x: float, y: float, radius: float) -> list[tuple[float, float]]:
        return [
            (x + radius * math.cos(math.pi * (place / 2 - 0.75)), y + radius * math.sin(math.pi * (place / 2 - 0.75)))
            for place in range(4)
        ]

    def link(one: tuple[float, float], other: tuple[float, float], near: float, far: float, **how: bool) -> None:
        length = math.dist(one, other)
        unit = ((other[0] - one[0]) / length, (other[1] - one[1]) / length)
        begin = (one[0] + near * unit[0], one[1] + near * unit[1])
        drawing.arrow(begin, (other[0] - far * unit[0], other[1] - far * unit[1]), **how)  # pyrefly: ignore

    def caption(x: float, y: float, title: str, *notes: str) -> None:
        drawing.text(x, y, title, "strong", "middle")
        for place, note in enumerate(notes):
            drawing.text(x, y + 15 + 14 * place, note, "small", "middle")

    ranks = around(100, 70, 58)
    for place, rank in enumerate(ranks):
        link(rank, ranks[(place + 1) % 4], 17, 19)
        drawing.circle(*rank, 15, "compute", str(place))
    caption(100, 146, "all_reduce", "everyone gets the mean")
    ranks = around(300, 70, 58)
    for place, rank in enumerate(ranks):
        link(rank, (300, 70), 19, 22, both=True)
        drawing.circle(*rank, 15, "compute", str(place))
    drawing.box(283, 55, 34, 30, "good", words="S")
    caption(300, 146, "parameter_server", "servers sum, or hold the model")
    ranks = around(100, 254, 58)
    for one, other in ((0, 1), (2, 3)):
        link(ranks[one], ranks[other], 19, 19, both=True)
    for place, rank in enumerate(ranks):
        drawing.circle(*rank, 15, "compute", str(place))
    drawing.line((ranks[1][0], ranks[1][1] + 18), (ranks[2][0], ranks[2][1] - 18), kind="dashed")
    drawing.line((ranks[3][0], ranks[3][1] - 18), (ranks[0][0], ranks[0][1] + 18), kind="dashed")
    caption(100, 330, "gossip, push_sum, choco", "a few neighbours at a time")
    for group in range(2):
        top = 206 + 62 * group
        drawing.box(226, top, 148, 44, "none", radius=6)
        for shard in range(3):
            drawing.box(234 + 46 * shard, top + 8, 40, 28, "compute", words="1/3")
    for shard in range(3):
        drawing.arrow((254 + 46 * shard, 244), (254 + 46 * shard, 274), both=True)
    caption(300, 330, "sharded models", "between groups of shards,", "or inside one (sharded)")
    return drawing


def compression() -> Drawing:
    """One gradient of sixteen values, and what each family sends of it."""
    drawing = Drawing(344, "What goes on the wire: all values, few bits, few entries, two thin matrices")
    values = (0.10, -0.32, 0.05, 0.9, -0.08, 0.2, -0.75, 0.02, 0.3, -0.12, 0.55, -0.04, 0.07, -0.5, 0.14, 0.03)

    def caption(y: float, title: str, note: str) -> None:
        drawing.text(4, y, title, "strong")
        drawing.text(396, y, note, "small", "end")

    def bars(y: float, shown: tuple[float, ...], kind: str) -> None:
        drawing.line((4, y), (396, y))
        for place, value in enumerate(shown):
            height = abs(value) * 26
            if height:
                drawing.box(7 + 24.4 * place, y - height if value > 0 else y, 18, height, kind, radius=1)

    caption(14, "none", "every value in full")
    bars(48, values, "compute")
    caption(98, "quantization: int8, int4, onebit, ...", "every value in few bits")
    bars(132, tuple(round(value * 3.5) / 3.5 for value in values), "codec")
    caption(182, "sparsification: topk, dgc, ...", "few values, and their places")
    bars(216, tuple(value if abs(value) >= 0.5 else 0.0 for value in values), "wire")
    caption(266, "low rank: powersgd", "two thin matrices")
    drawing.box(40, 278, 60, 60, "compute", words="M")
    drawing.text(126, 313, "\N{ALMOST EQUAL TO}", "strong", "middle")
    drawing.box(152, 278, 14, 60, "good")
    drawing.text(159, 313, "P", "small", "middle")
    drawing.text(182, 313, "\N{MULTIPLICATION SIGN}", "strong", "middle")
    drawing.box(198, 300, 60, 14, "good")
    drawing.text(228, 311, "Q", "small", "middle")
    drawing.text(272, 313, "(rank 1 to 16)", "small")
    return drawing


def choosing() -> Drawing:
    """Questions that lead to a strategy."""
    drawing = Drawing(596, "Which strategy to try first")

    def question(y: float, *words: str) -> None:
        drawing.box(4, y, 196, 22 + 16 * len(words), "box")
        for place, line in enumerate(words):
            drawing.text(102, y + 22 + 16 * place, line, anchor="middle")

    def answer(y: float, name: str, *notes: str) -> None:
        drawing.box(244, y, 152, 26, "good", words=name)
        for place, note in enumerate(notes):
            drawing.text(244, y + 41 + 14 * place, note, "small")

    steps = (
        (("Is exposed communication", "a small share of a step?"), "ddp", ("Nothing to gain: keep", "torch DDP.")),
        (("Must results equal those", "of DDP?"), "mg-wfbp or dear", ("Schedules hide what", "can be hidden.")),
        (("Is half of the bytes", "enough?"), "ddp-bf16", ("No loss in any run that", "we made.")),
        (("Is a quarter of the bytes", "enough?"), "int8", ("A loss within the noise", "of seeds.")),
        (
            ("Do the links allow one", "exchange per step?"),
            "powersgd + warmup",
            ("or demo-int4: about 30 to", "50 times fewer bytes."),
        ),
    )
    for place, (words, name, notes) in enumerate(steps):
        top = 4 + 108 * place
        question(top, *words)
        answer(top, name, *notes)
        bottom = top + 22 + 16 * len(words)
        drawing.arrow((200, top + 14), (242, top + 14))
        drawing.text(221, top + 9, "yes", "small", "middle")
        drawing.arrow((102, bottom), (102, top + 106))
        drawing.text(108, bottom + 20, "no", "small")
    drawing.box(4, 544, 196, 30, "good", words="streaming-diloco-int4")
    drawing.text(210, 556, "Local updates: bytes fall by", "small")
    drawing.text(210, 570, "the period, loss needs care.", "small")
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    "architectures": architectures,
    "axes": axes,
    "choosing": choosing,
    "compression": compression,
    "icon": icon,
    "journey": journey,
    "schedules": schedules,
    "synchronization": synchronization,
}


def main() -> None:
    """Write every picture."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
