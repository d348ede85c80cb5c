"""What all tests share. Owns: how the processes that they start end, and what they do not take from
the home of whoever runs them."""

from __future__ import annotations

import os
import signal

# A shell that puts a command aside has it ignore Ctrl-C, and so has everything that it starts: the
# tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A token of some other cluster in ~/.ray would lock the tests' own clusters, for half of Ray only.
os.environ["RAY_AUTH_MODE"] = "disabled"
