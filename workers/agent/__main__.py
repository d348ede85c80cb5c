"""`python -m holdfast.workers.agent`: the stand-alone agent, if this Python has what it needs.

torch is not checked: the program of the job may have an interpreter of its own.
"""

import sys

from holdfast.orchestrator.protocol import training_packages

if __name__ == "__main__":
    if problem := training_packages.problem(torch=False):
        sys.exit(f"error: {problem}")
    from .standalone import main

    main()
