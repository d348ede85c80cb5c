"""`python -m holdfast.workers.agent`: the stand-alone agent, if this Python has its packages. A
worker checks torch: the program of a job may have an interpreter of its own."""

from holdfast.orchestrator.protocol import training_packages

if __name__ == "__main__":
    if problem := training_packages.problem():
        raise SystemExit(f"error: {problem}")
    from .standalone import main

    main()
