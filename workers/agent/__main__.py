"""`python -m holdfast.workers.agent`: the stand-alone agent, if this Python has what it needs."""

import sys

from holdfast.orchestrator.protocol import training_packages

if __name__ == "__main__":
    if problem := training_packages.problem():
        sys.exit(f"error: {problem}")
    from .standalone import main

    main()
