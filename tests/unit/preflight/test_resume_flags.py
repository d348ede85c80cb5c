"""A flag with which a script resumes is proposed for resumeArgs, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.orchestrator.preflight import check_script


def proposed(tmp_path: Path, text: str, *, resumes: bool = False) -> list[str]:
    (tmp_path / "train.py").write_text(text)
    findings, _project = check_script(tmp_path / "train.py", [tmp_path], resumes=resumes)
    return [one.fix for one in findings if one.rule == "RES601"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('p.add_argument("--resume", default="")', '"--resume", "{checkpoint}"'),
        ('p.add_argument("-r", "--resume", action="store_true")', '"--resume"'),
        (
            'p.add_argument("--resume_from_checkpoint", type=str)',
            '"--resume_from_checkpoint", "{checkpoint}"',
        ),
        (
            "import argparse\np.add_argument('--auto-resume', "
            "action=argparse.BooleanOptionalAction)",
            '"--auto-resume"',
        ),
        (
            '@click.option("--resume-from")\ndef main(resume_from): ...',
            '"--resume-from", "{checkpoint}"',
        ),
        ("import typer\ndef main(resume: bool = False): ...", '"--resume"'),
        (
            "import typer\ndef main(*, resume_from: str = ''): ...",
            '"--resume-from", "{checkpoint}"',
        ),
        ("init_from = 'scratch'", '"--init_from=resume"'),
    ],
)
def test_a_flag_is_proposed(tmp_path: Path, text: str, words: str) -> None:
    assert proposed(tmp_path, text) == [f"write resumeArgs: [{words}]"]
    assert proposed(tmp_path, text, resumes=True) == []


@pytest.mark.parametrize(
    "text",
    [
        'p.add_argument("--resume-epochs", type=int)',
        "def main(resume: bool = False): ...",
        'import os\np.add_argument("--resume")\nos.environ.get("HOLDFAST_RESUME_FROM_CHECKPOINT")',
        'from holdfast import session\np.add_argument("--resume")',
    ],
)
def test_other_scripts_need_none(tmp_path: Path, text: str) -> None:
    assert proposed(tmp_path, text) == []
