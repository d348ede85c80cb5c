"""What all tests share. Owns: how the processes that they start end."""

from __future__ import annotations

import signal

# A shell that puts a command aside has it ignore Ctrl-C, and so has everything that it starts: the
# tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
