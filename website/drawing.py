"""A few shapes, enough for the pictures of the documentation: plain SVG that follows the reader's colour scheme.

Pictures are 400 units wide, so that their text can be read on a phone, where a page has about as many pixels.
"""

from __future__ import annotations

from html import escape

WIDTH = 400
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 11px; fill: #57606a; }
.strong { font-weight: 600; }
.line { stroke: #57606a; stroke-width: 1.5; fill: none; }
.dashed { stroke-dasharray: 4 3; }
.head { fill: #57606a; }
.box { fill: #f6f8fa; stroke: #d0d7de; }
.compute { fill: #9ec5fe; stroke: #4c8fe0; }
.late { fill: #d3e4fd; stroke: #9ec5fe; }
.codec { fill: #f7dd8b; stroke: #c59c1d; }
.wire { fill: #f4b6ae; stroke: #d0675a; }
.good { fill: #bfe5c7; stroke: #57a86a; }
.none { fill: none; stroke: #d0d7de; }
.on { fill: #1f2328; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8ee; }
  .small { fill: #a8b0bd; }
  .line { stroke: #a8b0bd; }
  .head { fill: #a8b0bd; }
  .box { fill: #2b303b; stroke: #4a5261; }
  .compute { fill: #28528c; stroke: #5a93dd; }
  .late { fill: #22374f; stroke: #3d659b; }
  .codec { fill: #6a5413; stroke: #c59c1d; }
  .wire { fill: #7a352d; stroke: #d0675a; }
  .good { fill: #23562f; stroke: #57a86a; }
  .none { stroke: #4a5261; }
  .on { fill: #e6e8ee; }
}
"""


class Drawing:
    """Shapes in the order in which they were drawn, and the SVG of them."""

    def __init__(self, height: float, title: str, *, width: float = WIDTH) -> None:
        self._size = (width, height)
        self._title = title
        self._shapes: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """One line of text; `y` is its base line."""
        self._shapes.append(
            f'<text x="{_n(x)}" y="{_n(y)}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, kind: str = "box", *, words: str = "", radius: float = 4
    ) -> None:
        """A rectangle, with words in its middle."""
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}"'
        self._shapes.append(f'<rect {place} class="{kind}"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 4.5, words, anchor="middle")

    def circle(self, x: float, y: float, radius: float, kind: str = "box", words: str = "") -> None:
        """A circle, with words in its middle."""
        self._shapes.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" class="{kind}"/>')
        if words:
            self.text(x, y + 4.5, words, anchor="middle")

    def arrow(self, *points: tuple[float, float], kind: str = "", both: bool = False) -> None:
        """A line through points with a head at its end, or at both ends."""
        path = "M" + " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self._shapes.append(f'<path d="{path}" class="line {kind}"/>')
        self._head(points[-2], points[-1])
        if both:
            self._head(points[1], points[0])

    def line(self, *points: tuple[float, float], kind: str = "") -> None:
        """A line through points."""
        self._shapes.append(f'<path d="M{" L".join(f"{_n(x)} {_n(y)}" for x, y in points)}" class="line {kind}"/>')

    def svg(self) -> str:
        """The whole picture."""
        width, height = self._size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" role="img">'
        parts = [head, f"<title>{escape(self._title)}</title>", f"<style>{_STYLE}</style>", *self._shapes, "</svg>"]
        return "\n".join(parts) + "\n"

    def _head(self, before: tuple[float, float], tip: tuple[float, float]) -> None:
        along_x, along_y = tip[0] - before[0], tip[1] - before[1]
        length = (along_x**2 + along_y**2) ** 0.5
        unit_x, unit_y = along_x / length, along_y / length
        back_x, back_y = tip[0] - 8 * unit_x, tip[1] - 8 * unit_y
        corners = (tip, (back_x - 4 * unit_y, back_y + 4 * unit_x), (back_x + 4 * unit_y, back_y - 4 * unit_x))
        self._shapes.append(f'<path d="M{" L".join(f"{_n(x)} {_n(y)}" for x, y in corners)} Z" class="head"/>')


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
