"""The results and tables of bench/kubernetes.py: Holdfast beside Kubernetes alone, from one run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import node_loss, operator_loss

REPLACED = "replacement running"


@dataclass
class Result:
    """Kubernetes alone. Seconds after the start for `start`, after the fault for `loss`."""

    settings: str
    fault: str
    start: dict[str, float] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    memory_mib: dict[str, float] = field(default_factory=dict)
    two_copies: bool = False
    """The old process still ran on its node when the replacement ran elsewhere."""


@dataclass
class Table:
    facts: dict[str, str]
    ours: list[node_loss.Result] = field(default_factory=list)
    restarts: list[operator_loss.Result] = field(default_factory=list)
    alone: list[Result] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def write(self, out: Path) -> None:
        body = {
            "conditions": self.facts,
            "busy_cores_before": self.noise,
            "holdfast": [asdict(result) for result in self.ours],
            "operator": [asdict(result) for result in self.restarts],
            "kubernetes": [asdict(result) for result in self.alone],
            "ratios": self.ratios(),
            "failures": self.failures,
        }
        out.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")
        lines = ["# What a lost node costs on Kubernetes", ""]
        lines += [f"{name}: {value}. " for name, value in self.facts.items()]
        lines += [
            f"Busy cores before the runs: most {max(self.noise):.2f}. One run each, Kubernetes and "
            "all nodes on this one machine, all in one go.",
        ]
        lines += self._side_by_side() if self.ours else []
        lines += self._ours() if self.ours else []
        lines += self._restarts() if self.restarts else []
        lines += self._alone() if self.alone else []
        if self.failures:
            lines += ["", "Runs that failed:", "", *(f"* {one}" for one in self.failures)]
        out.with_suffix(".md").write_text("\n".join(lines) + "\n")

    def ratios(self) -> list[dict[str, Any]]:
        """Kubernetes' seconds over Holdfast's; None where one side was not measured."""
        yardsticks = self._yardsticks()
        return [
            {
                "case": one.case,
                "holdfast_s": one.next_step_s,
                **{
                    settings: round(alone_s / one.next_step_s, 1) if one.next_step_s else None
                    for settings, alone_s in yardsticks.items()
                },
            }
            for one in self.ours
        ]

    def _yardsticks(self) -> dict[str, float]:
        """Settings -> seconds from the loss of power until the replacement runs."""
        return {
            result.settings: result.loss[REPLACED]
            for result in reversed(self.alone)
            if result.fault == "power" and REPLACED in result.loss
        }

    def _side_by_side(self) -> list[str]:
        yardsticks = self._yardsticks()
        lines = [
            "",
            "A node loses its power: seconds until Holdfast's job has finished its next step, and "
            "until Kubernetes alone runs the lost pod elsewhere (a pod that runs has imported "
            "nothing, restored nothing and trained nothing yet).",
            "",
            "| Holdfast, Kubernetes at its default settings | next step | steps lost |"
            + "".join(f" Kubernetes alone, {name} | ratio |" for name in yardsticks),
            "|---|---|---|" + "---|---|" * len(yardsticks),
        ]
        for one, ratio in zip(self.ours, self.ratios(), strict=True):
            cells = "".join(f" {s:.1f} s | {ratio[name]:.1f}x |" for name, s in yardsticks.items())
            lines.append(f"| {one.case} | {one.next_step_s:.2f} s | {one.steps_lost} |{cells}")
        return lines

    def _ours(self) -> list[str]:
        lines = [
            "",
            "## Holdfast, Kubernetes at its default settings",
            "",
            "4 ranks in 2 pods on 2 of 3 nodes, HSDP 2 x 2 over gloo. The node of the pod without "
            "rank 0 loses its power, its cable first. By the times of the workers' log lines.",
            "",
            "| case | apply to first step | power loss to next step | steps lost | Kubernetes' "
            "view of the node then | decision |",
            "|---|---|---|---|---|---|",
        ]
        return lines + [
            f"| {one.case} | {one.first_step_s:.1f} s | {one.next_step_s:.2f} s | {one.steps_lost} "
            f"| Ready={one.node_readiness} | {one.decision} |"
            for one in self.ours
        ]

    def _restarts(self) -> list[str]:
        lines = [
            "",
            "## The operator is killed",
            "",
            "The same job on two nodes. SIGKILL of the only operator, and another one ten seconds "
            "later.",
            "",
            "| no operator for | steps meanwhile | longest step since | longest before | median "
            "before | steps lost | incidents | generations |",
            "|---|---|---|---|---|---|---|---|",
        ]
        return lines + [
            f"| {one.away_s:.1f} s | {one.steps_meanwhile} | {one.gap_s:.2f} s "
            f"| {one.gap_before_s:.2f} s | {one.step_s:.3f} s | {one.steps_lost} "
            f"| {one.num_incidents} | {one.num_generations} |"
            for one in self.restarts
        ]

    def _alone(self) -> list[str]:
        results = self.alone
        lines = [
            "",
            "## Kubernetes alone",
            "",
            "A Deployment of two pods on three nodes; the node of one of them loses its power "
            "(cable first) or is cut off and healed once the replacement runs.",
            "",
            "| seconds after the fault | "
            + " | ".join(f"{r.settings}, {r.fault}" for r in results)
            + " |",
            "|---|" + "---|" * len(results),
        ]
        for what in dict.fromkeys(what for result in results for what in result.loss):
            cells = [f"{r.loss[what]:.1f}" if what in r.loss else "" for r in results]
            lines.append(f"| {what} | " + " | ".join(cells) + " |")
        copies = ["yes" if r.two_copies else "no" for r in results]
        lines.append("| old process runs beside the replacement | " + " | ".join(copies) + " |")
        lines += ["", "Seconds after the start of everything, and memory:", ""]
        for result in results:
            times = ", ".join(f"{what} {value:.1f} s" for what, value in result.start.items())
            sizes = ", ".join(f"{what} {size:.0f} MiB" for what, size in result.memory_mib.items())
            lines.append(f"* {result.settings}, {result.fault}: {times}; {sizes}.")
        return lines
