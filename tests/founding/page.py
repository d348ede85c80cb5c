"""`python -m tests.founding.page`: writes bench/results/founding_documents.md from the lines, their
evidence and the planner's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdfast.orchestrator.explorer.ranking import Alternative
from holdfast.orchestrator.planner.memory import USABLE

from .document import ROOT, VERDICTS, Evidence, Line, Section, resolve, sections, short_names
from .tables import answers, claims, fewest_table, zero_table

PAGE = ROOT / "bench/results/founding_documents.md"
UP = "../../"

BEGINNING = """# The founding documents, line by line

Holdfast began with four texts on distributed training: **A** on FSDP2, DeepSpeed and Megatron-LM
(notes for interviews), **B** on FSDP and ZeRO, **C** on torch.distributed in depth, **D** on the
anatomy of FSDP. Every system, option, formula, figure, rule, diagnostic and exercise of theirs is a
line here, {total} in all, among them {errors} errors with what is right.

This page is written by `python -m tests.founding.page`: the lines are in tests/founding/lines, the
numbers are computed by the planner in tests/founding/figures.py, and `make test` checks that each
test, field, rule and page exists and that this page is current. GB are powers of ten, as in the
texts; "fits" is {usable:.0%} of a device. Times and shares of a step are the planner's estimates,
which were measured on no GPU here.

| verdict | meaning |
|---|---|
| supported | Holdfast does it, and the named test shows it |
| computed | the line is right, and the planner has its number |
| answered | no feature, but what holds is said, by preflight or here |
| refuted | the line is wrong; what is right stands beside it |
| not supported | Holdfast does not do it; what to do instead stands beside it |

An error is *refused* by plan, by validation or by a check of the planner, *linted* by
[preflight](../../docs/user/preflight.md), or *answered* here.
"""

ZERO_TEXT = """## Tables of ZeRO

GB of states of one rank. *Paper*: 2 + 2 + 12 bytes for a parameter (documents A, C). *float32*: 4 +
4 + 8 (document B). *Holdfast*: what [its spelling of each](../../docs/user/sharding.md) keeps:
float32 shards, and whole parameters in bfloat16 and gradients in float32 where the stage keeps
them.
"""
FEWEST_TEXT = """## Fewest devices

Document A's column "min GPUs" beside the fewest on which full training fits: FSDP over all, blocks
computed again, the loss in chunks, one sample of 2,048 tokens a rank, in whole nodes. *Offload* is
what main memory must hold if `offload: cpu` takes the states from fewer devices.
"""
SCENARIO_TEXT = """## Scenarios

Document C's six, for full training with 4,096 tokens a sample and 4 Mi tokens a step. *Needs*: the
document's strategy with recomputation and the loss in chunks, one sample at a time. *The planner's
choice* is what `spec plan --model` ranks first; *without offload* what it ranks first with all
states on the devices. Whether main memory holds what is offloaded is not checked here: it is in the
plan of a job.
"""
CLAIM_TEXT = """## Claims of throughput

Document A's rows beside what the devices compute at their peak without a pause. A claim above it is
refused.
"""
EVIDENCE_TEXT = """## Evidence

The short names above.
"""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(head)
    yield "| " + " | ".join(names) + " |"
    yield "|---" * len(names) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def link(evidence: Evidence) -> str:
    anchor = f"#{evidence.anchor}" if evidence.anchor else ""
    return f"[{evidence.label}]({UP}{evidence.path}{anchor})"


def where(line: Line) -> str:
    shown = [link(resolve(text)) for text in line.where]
    return ", ".join([*shown, *([line.source] if line.source else [])])


def section_rows(section: Section) -> Iterator[str]:
    errors = any(line.by for line in section.lines.values())
    head = ["", "in", "line", "by" if errors else "verdict", "what is right", "where"]
    yield f"## {section.title}"
    yield ""
    yield from table(
        head,
        (
            [name, line.documents, line.line, line.by or line.verdict, line.text(), where(line)]
            for name, line in section.lines.items()
        ),
    )


def counts(all_sections: Iterable[Section]) -> Iterator[str]:
    rows, sums = [], Counter[str]()
    for section in all_sections:
        found = Counter(line.verdict for line in section.lines.values())
        sums += found
        rows.append([section.title, str(found.total()), *(str(found[one]) for one in VERDICTS)])
    rows.append(["all", str(sums.total()), *(str(sums[one]) for one in VERDICTS)])
    yield from table(["section", "lines", *VERDICTS], rows)


# -- tables of numbers --------------------------------------------------------------------------
def zero() -> Iterator[str]:
    ways, stages = ("paper", "float32", "Holdfast"), ("ZeRO-1", "ZeRO-2", "ZeRO-3")
    head = ["parameters", "ranks", "DDP", *(f"{one}, {way}" for way in ways for one in stages)]
    rows = (
        [
            f"{row.billions} B", str(row.ranks), gb(row.paper[0]),
            *(gb(size) for sizes in (row.paper, row.float32, row.own) for size in sizes[1:]),
        ]
        for row in zero_table()
    )  # fmt: skip
    yield from table(head, rows)


def gb(size: float) -> str:
    return f"{size:,.0f}" if size >= 100 else f"{size:.1f}"


def fewest() -> Iterator[str]:
    head = ["model", "document", "its states, each", "device has", "fewest", "each", "offload"]
    rows = (
        [
            row.model, row.document, f"{gb(row.document_needs)} GB", f"{gb(row.have)} GB",
            f"{row.number} x {row.kind}", f"{gb(row.peak)} GB", f"{gb(row.host)} GB",
        ]
        for row in fewest_table()
    )  # fmt: skip
    yield from table(head, rows)


def alternative(one: Alternative | None) -> str:
    if one is None:
        return "nothing fits"
    text = f"{one.strategy} ({one.mesh.describe()}), {gb(one.peak_bytes / 1e9)} GB"
    checkpointing = one.settings.get("activationCheckpointing")
    if checkpointing:
        text += f", recomputation {' '.join(checkpointing)}"
    return text + (", offload" if "offload" in one.settings else "")


def scenarios() -> Iterator[str]:
    head = ["", "model and devices", "document", "needs", "fits", "the planner's choice"]
    rows = (
        [
            answer.scenario.id, f"{answer.scenario.model}, {answer.scenario.devices}",
            answer.scenario.says, f"{gb(answer.needs)} of {gb(answer.have)} GB",
            "yes" if answer.fits else "no", alternative(answer.best),
            alternative(answer.without_offload),
        ]
        for answer in answers()
    )  # fmt: skip
    yield from table([*head, "without offload"], rows)


def throughput() -> Iterator[str]:
    head = ["", "model and devices", "claimed tokens/s", "at the peak", "claim / peak"]
    rows = (
        [
            claim.id, f"{claim.model}, {claim.devices}", f"{claim.tokens:,.0f}",
            f"{claim.ceiling:,.0f}", f"{claim.tokens / claim.ceiling:.0%}",
        ]
        for claim in claims()
    )  # fmt: skip
    yield from table(head, rows)


def evidence() -> Iterator[str]:
    rows = (
        [name.replace("_", " "), f"[{path.rpartition('::')[2]}]({UP}{path.partition('::')[0]})"]
        for name, path in short_names().items()
    )
    yield from table(["name", "test"], rows)


def render() -> str:
    """The whole page."""
    every = sections()
    lines = [line for section in every for line in section.lines.values()]
    errors = sum(1 for line in lines if line.by)
    parts = [BEGINNING.format(total=len(lines), errors=errors, usable=USABLE)]
    parts += counts(every)
    for section in every:
        parts += section_rows(section)
    for text, rows in (
        (ZERO_TEXT, zero()), (FEWEST_TEXT, fewest()), (SCENARIO_TEXT, scenarios()),
        (CLAIM_TEXT, throughput()), (EVIDENCE_TEXT, evidence()),
    ):  # fmt: skip
        parts += [text, *rows]
    return "\n".join(parts).rstrip() + "\n"


def main(page: Path = PAGE) -> None:
    page.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
