"""`python -m holdfast.workers.agent`: the stand-alone agent, if this Python has what it needs but
torch: the program of the job may have an interpreter of its own."""

from holdfast.orchestrator.protocol import training_packages

if __name__ == "__main__":
    if problem := training_packages.problem(torch=False):
        raise SystemExit(f"error: {problem}")
    from .standalone import main

    main()
