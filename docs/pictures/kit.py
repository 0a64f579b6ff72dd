"""A small pen for the book's pictures: boxes, words and arrows as SVG, in colours that follow light
and dark.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from types import MappingProxyType

HERE = Path(__file__).resolve().parent

# What a colour means, in light and in dark.
COLOURS = MappingProxyType(
    {
        "card": ("#ffffff", "#131a20"),
        "hint": ("#f1f5f7", "#1d2730"),
        "ink": ("#1b2733", "#e8eef3"),
        "soft": ("#566675", "#a3b3c0"),
        "line": ("#c3ced8", "#40505d"),
        "reused": ("#c4e9e0", "#1d5a50"),
        "exact": ("#86ccbc", "#2f8674"),
        "again": ("#f3a75c", "#c2702a"),
        "fresh": ("#86b1e6", "#3667a9"),
        "load": ("#c8b8ec", "#6a54a4"),
    }
)
FONT = "Inter, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"


def style(which: int) -> str:
    """All colours of light (0) or dark (1) as variables."""
    return "".join(f"--{name}:{pair[which]};" for name, pair in COLOURS.items())


class Picture:
    """One picture of so many points; what is drawn later lies above."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []
        self.box(0.5, 0.5, width - 1, height - 1, "card", edge="line", round_=10)

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str = "hint",
        edge: str = "",
        round_: float = 4,
    ) -> None:
        """A filled rectangle, with a line around it if `edge` names a colour."""
        line = f"stroke:{_colour(edge)};stroke-width:1" if edge else ""
        look = f"fill:{_colour(fill) if fill else 'none'};{line}"
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{round_:g}"'
            f' style="{look}"/>'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        fill: str = "ink",
        at: str = "start",
        bold: bool = False,
    ) -> None:
        """One line of text, its base at y; at: start, middle or end."""
        weight = ";font-weight:600" if bold else ""
        look = f"fill:{_colour(fill)};font-size:{size:g}px{weight}"
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{at}" style="{look}">{escape(text)}</text>'
        )

    def label(
        self, x: float, y: float, w: float, h: float, text: str, fill: str, size: float = 12
    ) -> None:
        """A box with words in its middle; a line break begins a second line."""
        self.box(x, y, w, h, fill)
        lines = text.split("\n")
        first = y + h / 2 + size * 0.36 - (len(lines) - 1) * size * 0.62
        for number, line in enumerate(lines):
            self.words(x + w / 2, first + number * size * 1.24, line, size, at="middle")

    def line(self, *points: tuple[float, float], fill: str = "soft", dashed: bool = False) -> None:
        """A line through points."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ";stroke-dasharray:4 4" if dashed else ""
        self._parts.append(
            f'<path d="{path}" style="fill:none;stroke:{_colour(fill)};stroke-width:1.5{dash}"/>'
        )

    def arrow(self, *points: tuple[float, float], fill: str = "soft") -> None:
        """A line through points with a head at its end."""
        self.line(*points, fill=fill)
        (x0, y0), (x, y) = points[-2:]
        length = max(((x - x0) ** 2 + (y - y0) ** 2) ** 0.5, 1e-6)
        dx, dy = (x - x0) / length, (y - y0) / length
        left = f"{x - 8 * dx + 4 * dy:g} {y - 8 * dy - 4 * dx:g}"
        right = f"{x - 8 * dx - 4 * dy:g} {y - 8 * dy + 4 * dx:g}"
        self._parts.append(
            f'<path d="M{x:g} {y:g} L{left} L{right} Z" style="fill:{_colour(fill)}"/>'
        )

    def legend(self, x: float, y: float, *entries: tuple[str, str], gap: float = 28) -> None:
        """Small boxes and what their colours mean, in one row."""
        for fill, text in entries:
            self.box(x, y - 10, 14, 12, fill, round_=3)
            self.words(x + 20, y, text, 12, "soft")
            x += 20 + len(text) * 6.8 + gap

    def svg(self) -> str:
        """The whole, in light or dark as whoever shows it prefers."""
        look = f"svg.rf{{{style(0)}}}@media (prefers-color-scheme:dark){{svg.rf{{{style(1)}}}}}"
        head = (
            f'<svg class="rf" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width}'
            f' {self.height}" width="{self.width}"'
            f' style="max-width:100%;height:auto;font-family:{escape(FONT, quote=False)}">'
        )
        return "\n".join([head, f"<style>{look}</style>", *self._parts, "</svg>\n"])


def fixed(svg: str, which: int) -> str:
    """The same in the colours of light (0) or dark (1) alone, for what knows no variables."""
    for name, pair in COLOURS.items():
        svg = svg.replace(f"var(--{name})", pair[which])
    return svg


def _colour(name: str) -> str:
    if name not in COLOURS:
        raise ValueError(f"No colour '{name}'; it is one of: {', '.join(COLOURS)}.")
    return f"var(--{name})"
