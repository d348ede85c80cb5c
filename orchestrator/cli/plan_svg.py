"""The picture of `holdfast plan --svg`: memory by phase of a step, and where its time goes.

Drawn with shapes and text only, so it needs no library and is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from ..explorer.estimate import Estimate
from ..explorer.model_plan import ModelPlan
from ..explorer.plan import Plan
from ..planner.terms import CATEGORIES, Category
from .output import seconds, size

WIDTH, LEFT, RIGHT = 920, 150, 40
BAR, GAP = 26, 10
COLOURS = (
    "#4269d0", "#6cc5b0", "#efb118", "#97bbf5", "#3ca951", "#9c6b4e", "#ff725c", "#9498a0",
    "#a463f2", "#ff8ab7", "#c7b58c",
)  # fmt: skip
"""Colours of Observable's categorical scheme, which stays readable for colour-blind people."""


def draw(plan: Plan | ModelPlan) -> str:
    """The plan's estimate as an SVG document."""
    figures = plan.estimate
    assert figures is not None
    title = plan.verdict if isinstance(plan, ModelPlan) else f"{plan.job}: {plan.mesh.describe()}"
    top = 60.0
    shapes = [_text(20, 28, title, bold=True)]
    memory, top = _memory(figures, plan.device_memory_bytes, top)
    shapes += memory
    if figures.time is not None:
        step, top = _step(figures, top + 50)
        shapes += step
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top + 20:.0f}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _memory(figures: Estimate, limit: int | None, top: float) -> tuple[list[str], float]:
    """One bar for each phase, by category, with the device's memory as a line."""
    shapes = [_text(20, top, "Memory of a worker's device in the phases of a step", bold=True)]
    most = max(max(figures.phases.values()), limit or 0)
    scale = (WIDTH - LEFT - RIGHT) / max(1, most)
    top += 14
    first = top
    for phase, total in figures.phases.items():
        shapes.append(_text(LEFT - 8, top + BAR * 0.68, phase, anchor="end"))
        x = float(LEFT)
        for name, num_bytes in _categories(figures, phase):
            width, colour = num_bytes * scale, COLOURS[CATEGORIES.index(name)]
            shapes.append(_bar(x, top, width, colour, f"{name}: {size(num_bytes)}"))
            x += width
        shapes.append(_text(x + 4, top + BAR * 0.68, size(total)))
        top += BAR + GAP
    if limit:
        x = LEFT + limit * scale
        shapes.append(
            f'<line x1="{x:.1f}" y1="{first - 4:.1f}" x2="{x:.1f}" y2="{top:.1f}" '
            f'stroke="#d62728" stroke-dasharray="4 3"/>'
        )
        shapes.append(_text(x, top + 12, f"device: {size(limit)}", anchor="end", colour="#d62728"))
    legend = [name for name in CATEGORIES if any(row.category == name for row in figures.memory)]
    shapes += _legend([(name, COLOURS[CATEGORIES.index(name)]) for name in legend], top + 34)
    return shapes, top + 40


def _categories(figures: Estimate, phase: str) -> Iterator[tuple[Category, int]]:
    for name in CATEGORIES:
        rows = (r.num_bytes for r in figures.memory if r.category == name and phase in r.phases)
        if num_bytes := sum(rows):
            yield name, num_bytes


def _step(figures: Estimate, top: float) -> tuple[list[str], float]:
    """The parts of a step one after the other: compute above, what is exposed below."""
    time = figures.time
    assert time is not None
    head = f"A step on {time.device}: {seconds(time.seconds)}, {time.tokens_per_s:,.0f} tokens/s, "
    shapes = [_text(20, top, f"{head}MFU {time.mfu:.1%}", bold=True)]
    top += 14
    scale, x = (WIDTH - LEFT - RIGHT) / time.seconds, float(LEFT)
    for line, label in ((0, "compute"), (1, "exposed")):
        shapes.append(_text(LEFT - 8, top + (BAR + GAP) * line + BAR * 0.68, label, anchor="end"))
    for number, row in enumerate(time.rows):
        width, y = row.seconds * scale, top + (BAR + GAP) * row.exposed
        colour = COLOURS[number % len(COLOURS)]
        shapes.append(_bar(x, y, width, colour, f"{row.what}: {seconds(row.seconds)}"))
        x += width
    top += 2 * (BAR + GAP)
    shapes.append(_text(LEFT - 8, top + BAR * 0.68, "beside compute", anchor="end"))
    width = min(1.0, time.hidden_seconds / time.seconds) * (WIDTH - LEFT - RIGHT)
    text = f"communication beside compute: {seconds(time.hidden_seconds)}"
    shapes.append(_bar(LEFT, top, width, "#c9ced6", text))
    top += BAR + 22
    names = [f"{row.what} {row.seconds / time.seconds:.0%}" for row in time.rows]
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(names))]
    shapes += _legend(list(zip(names, colours, strict=True)), top)
    return shapes, top + 20 * (-(-len(names) // 4))


def _legend(entries: list[tuple[str, str]], top: float) -> list[str]:
    shapes = []
    for number, (name, colour) in enumerate(entries):
        x, y = 20 + 220 * (number % 4), top + 18 * (number // 4)
        shapes.append(f'<rect x="{x}" y="{y - 9:.1f}" width="10" height="10" fill="{colour}"/>')
        shapes.append(_text(x + 15, y, name))
    return shapes


def _bar(x: float, y: float, width: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{BAR}" '
        f'fill="{colour}"><title>{escape(title)}</title></rect>'
    )


def _text(
    x: float, y: float, text: str, *, bold: bool = False, anchor: str = "start",
    colour: str = "#222",
) -> str:  # fmt: skip
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{escape(text)}</text>"
    )
