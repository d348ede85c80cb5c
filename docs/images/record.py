"""Records a real `holdfast run` in a terminal and writes it as an animated SVG for the README.

    python docs/images/record.py docs/images/run.svg        # needs: pip install pyte

The job is examples/stdlib-bytes.yaml with fewer steps. While it trains, the script kills one worker
and then a whole node with `holdfast debug`, as a reader would from another terminal. Every
character in the picture comes from that run. The picture plays SPEED times faster than the run did.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

import pyte
import yaml

ROOT = Path(__file__).parents[2]
COLUMNS, ROWS = 100, 34
STEPS = 140
KILL_WORKER_AT, KILL_NODE_AT = 40, 80
SPEED = 2.5
FRAME_S = 0.25
LAST_FRAME_S = 6.0
CHAR_WIDTH, LINE_HEIGHT, MARGIN = 8.43, 18, 14
COLORS = {
    "default": "#d4d4d4", "black": "#808080", "red": "#f48771", "green": "#89d185",
    "brown": "#e5c07b", "yellow": "#e5c07b", "blue": "#61afef", "magenta": "#c678dd",
    "cyan": "#56b6c2", "white": "#ffffff",
}  # fmt: skip

Line = tuple[tuple[str, str, bool], ...]
"""Runs of characters: text, color, bold."""


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        frames = record(Path(temporary))
    target.write_text(svg(frames), encoding="utf-8")
    print(f"{target}: {target.stat().st_size / 1e3:.0f} kB, {len(frames)} frames")


def record(home: Path) -> list[tuple[float, list[Line]]]:
    """Run the job, break it twice; the screen whenever it changed, with its time in seconds."""
    job = yaml.safe_load((ROOT / "examples/stdlib-bytes.yaml").read_text())
    job["spec"]["entrypoint"]["recipe"]["config"]["steps"] = STEPS
    (home / "stdlib-bytes.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    holdfast = str(Path(sys.executable).with_name("holdfast"))
    process, master = pty.fork()
    if process == 0:
        environment = {**os.environ, "TERM": "xterm-256color", "HOLDFAST_HOME": str(home / "jobs")}
        os.chdir(home)
        os.execve(holdfast, ["holdfast", "run", "stdlib-bytes.yaml"], environment)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    frames: list[tuple[float, list[Line]]] = []
    faults = [
        (KILL_WORKER_AT, "kill-worker"),
        (KILL_NODE_AT, "kill-node"),
    ]
    begun = due = time.monotonic()
    while True:
        readable, _, _ = select.select([master], [], [], FRAME_S)
        if readable:
            try:
                chunk = os.read(master, 65536)
            except OSError:
                chunk = b""
            if not chunk:
                break
            stream.feed(chunk)
        now = time.monotonic()
        if now >= due:
            due = now + FRAME_S
            seen = lines(screen)
            if not frames or frames[-1][1] != seen:
                frames.append((now - begun, seen))
            if faults and step(screen) >= faults[0][0]:
                fault = faults.pop(0)[1]
                command = [holdfast, "debug", fault, "stdlib-bytes", "--home", f"{home}/jobs"]
                subprocess.run(command, check=True, capture_output=True)
    os.waitpid(process, 0)
    frames.append((time.monotonic() - begun, lines(screen)))
    return frames


def step(screen: pyte.Screen) -> int:
    """Steps that the display counts ("61 of 140 steps"), -1 before it does."""
    found = re.search(r"(\d+) of \d+ steps", "\n".join(screen.display))
    return int(found.group(1)) if found else -1


def lines(screen: pyte.Screen) -> list[Line]:
    return [line(screen, row) for row in range(ROWS)]


def line(screen: pyte.Screen, row: int) -> Line:
    runs: list[tuple[str, str, bool]] = []
    text = screen.display[row].rstrip()
    for column, character in enumerate(text):
        cell = screen.buffer[row][column]
        color = COLORS.get(cell.fg, "#" + cell.fg if len(cell.fg) == 6 else COLORS["default"])
        if runs and runs[-1][1:] == (color, cell.bold):
            runs[-1] = (runs[-1][0] + character, color, cell.bold)
        else:
            runs.append((character, color, cell.bold))
    return tuple(runs)


@dataclass
class Shown:
    """One line of text at one row, and when it is visible."""

    row: int
    line: Line
    spans: list[tuple[float, float]] = field(default_factory=list)


def svg(frames: list[tuple[float, list[Line]]]) -> str:
    """Each distinct line is drawn once and switched on and off, so that the file stays small."""
    first = frames[0][0]
    times = [(at - first) / SPEED for at, _ in frames]
    total = times[-1] + LAST_FRAME_S
    ends = [*times[1:], total]
    shown: dict[tuple[int, Line], Shown] = {}
    for begin, end, (_, screen) in zip(times, ends, frames, strict=True):
        for row, content in enumerate(screen):
            if content:
                one = shown.setdefault((row, content), Shown(row, content))
                if one.spans and one.spans[-1][1] == begin:
                    one.spans[-1] = (one.spans[-1][0], end)
                else:
                    one.spans.append((begin, end))
    used = 1 + max(one.row for one in shown.values())
    width = COLUMNS * CHAR_WIDTH + 2 * MARGIN
    height = used * LINE_HEIGHT + 2 * MARGIN
    body = "\n".join(element(one, total) for one in shown.values())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" '
        'font-size="14">\n<rect width="100%" height="100%" rx="8" fill="#1e1e1e"/>\n'
        f"{body}\n</svg>\n"
    )


def element(one: Shown, total: float) -> str:
    y = MARGIN + (one.row + 0.75) * LINE_HEIGHT
    spans = "".join(
        f'<tspan fill="{color}"{" font-weight=" + chr(34) + "bold" + chr(34) if bold else ""}>'
        f"{escape(text)}</tspan>"
        for text, color, bold in one.line
    )
    content = f'<text x="{MARGIN}" y="{y:.0f}" xml:space="preserve">{spans}'
    if one.spans != [(0.0, total)]:
        keys, values = ["0"], ["visible" if one.spans[0][0] == 0 else "hidden"]
        for begin, end in one.spans:
            if begin > 0:
                keys, values = [*keys, f"{begin / total:.4f}"], [*values, "visible"]
            if end < total:
                keys, values = [*keys, f"{end / total:.4f}"], [*values, "hidden"]
        content += (
            f'<animate attributeName="visibility" calcMode="discrete" dur="{total:.2f}s" '
            f'repeatCount="indefinite" keyTimes="{";".join(keys)}" values="{";".join(values)}"/>'
        )
    return content + "</text>"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
