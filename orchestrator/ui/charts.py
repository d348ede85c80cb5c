"""Lines and bars as SVG without text, so that they stay sharp at any width. Nothing needs a style
attribute or a script."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup, escape

WIDTH, HEIGHT = 1000.0, 100.0

Point = tuple[float, float]
"""Seconds and value."""


class Mark(NamedTuple):
    """An incident on the axis of time."""

    at_s: float
    title: str


class Chart(NamedTuple):
    """One series over time, with its words."""

    name: str
    svg: Markup
    newest: str
    low: str
    high: str
    points: str
    """JSON, for the values under a pointer."""
    summary: str


def line(
    name: str, points: Sequence[Point], marks: Sequence[Mark], words: Callable[[float], str]
) -> Chart | None:
    """A line that ends at each mark and begins again after it; None: fewer than two points."""
    points = [(at, value) for at, value in points if math.isfinite(value)]
    if len(points) < 2:
        return None
    begin, end = points[0][0], max(points[-1][0], points[0][0] + 1e-9)
    low, high = min(value for _, value in points), max(value for _, value in points)
    span = high - low or abs(high) or 1.0

    def x(at: float) -> float:
        return (at - begin) / (end - begin) * WIDTH

    def y(value: float) -> float:
        return HEIGHT - 4 - (value - low) / span * (HEIGHT - 8)

    parts: list[Markup] = []
    for mark in marks:
        if begin <= mark.at_s <= end:
            at = Markup('<path class="mark" d="M{0:.1f} 0V{1:.0f}"><title>{2}</title></path>')
            parts.append(at.format(x(mark.at_s), HEIGHT, mark.title))
    path = [f"M{x(points[0][0]):.1f} {y(points[0][1]):.1f}"]
    for (before, _), (at_s, value) in pairwise(points):
        cut = any(before < mark.at_s <= at_s for mark in marks)
        path.append(f"{'M' if cut else 'L'}{x(at_s):.1f} {y(value):.1f}")
    parts.append(Markup('<path class="line" d="{0}"/>').format("".join(path)))
    svg = Markup(
        '<svg viewBox="0 0 {0:.0f} {1:.0f}" preserveAspectRatio="none" aria-hidden="true">'
    )
    shown = [[round(at, 1), value] for at, value in points]
    summary = f"{name} from {words(points[0][1])} to {words(points[-1][1])}"
    return Chart(
        name,
        svg.format(WIDTH, HEIGHT) + Markup("").join(parts) + Markup("</svg>"),
        words(points[-1][1]),
        words(low),
        words(high),
        json.dumps(shown),
        summary,
    )


def bar(parts: Iterable[tuple[str, float, str]], total: float) -> Markup:
    """One bar of parts side by side: (colour, amount, title). `total` fills the whole width."""
    at, drawn = 0.0, Markup("")
    for colour, amount, title in parts:
        width = amount / total * WIDTH if total > 0 else 0.0
        rect = Markup('<rect class="c-{0}" x="{1:.1f}" width="{2:.1f}" height="10">')
        drawn += rect.format(colour, at, max(width, 2.0 if amount > 0 else 0.0))
        drawn += Markup("<title>{0}</title></rect>").format(escape(title))
        at += width
    head = Markup(
        '<svg class="bar" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">'
    )
    return head + drawn + Markup("</svg>")
