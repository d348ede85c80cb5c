"""Files of the machines of a Ray cluster, asked for from outside of it.

Owns: that question. Must not: know what they are for.
"""

from __future__ import annotations

from pathlib import Path

from . import cluster

ANSWER_S = 60.0


def on_no_node(path: str) -> bool:
    """Whether all Ray nodes that answer say that there is no such file."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(_is_file)
    asked = []
    for node in cluster.alive_nodes():
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        asked.append(look.options(scheduling_strategy=there).remote(path))
    answers = []
    for answer in ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)[0] if asked else ():
        try:
            answers.append(bool(ray.get(answer)))
        except RayError:
            continue
    return bool(answers) and not any(answers)


def _is_file(path: str) -> bool:
    return Path(path).is_file()
