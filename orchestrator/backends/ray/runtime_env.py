"""What Ray says of a runtime env that it cannot build.

Owns: what of it is worth telling. Must not: know who wanted it.
"""

from __future__ import annotations

import re

FRAMES = re.compile(r"Traceback \(most recent call last\):\n(?:[ ].*\n)*")
"""Where in Ray it happened, which is no news to who wrote the runtime env."""
GENERAL = re.compile(r"(Failed to set up runtime environment|Could not create the actor because).*")
"""What is true of every such error."""
SHORT = 200
"""Characters of each end. What was wanted stands first, and what pip says to it last."""


def words(text: str) -> str:
    """All that is worth telling, in lines."""
    return FRAMES.sub("", text).strip()


def short(text: str) -> str:
    """Its two ends, in one line."""
    line = " ".join(GENERAL.sub("", words(text)).split())
    return line if len(line) <= 2 * SHORT else f"{line[:SHORT]} ... {line[-SHORT:]}"
