"""Files that are read, the resolution of names, and what a comment silences."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.preflight import RULES, check_script, source

from .conftest import Lint, places

WRONG = "if dist.get_rank() == 0:\n    dist.barrier()\n"


@pytest.mark.parametrize(
    "imported",
    [
        "import torch.distributed as dist\n",
        "from torch import distributed as dist\n",
        "import torch\ndist = torch.distributed\n",
        "from helpers import dist\n",
        "import helpers\nfrom helpers import other as dist\n",
    ],
)
def test_a_module_is_known_behind_any_import(imported: str, lint: Lint) -> None:
    helpers = "from torch import distributed as dist\nimport torch.distributed as other\n"
    found = places(lint(imported + WRONG, helpers=helpers))
    assert [rule for rule, _line in found] == ["HANG101"]


def test_another_module_of_the_same_name_is_left_alone(lint: Lint) -> None:
    assert places(lint("import dist\n" + WRONG, dist="def barrier():\n    pass\n")) == []


def test_a_comment_silences_one_rule_in_one_line(lint: Lint) -> None:
    text = "import torch.distributed as dist\nif dist.get_rank() == 0:\n"
    silenced = "    dist.barrier()  # holdfast: ignore[HANG101] only two ranks\n"
    assert places(lint(text + silenced)) == []
    assert places(lint(text + silenced.replace("HANG101", "FSDP203"))) == [("HANG101", 3)]
    assert places(lint(text + silenced.replace("HANG101", "HANG999"))) == [
        ("PRE002", 3),
        ("HANG101", 3),
    ]


def test_a_comment_in_a_text_silences_nothing(lint: Lint) -> None:
    text = "import torch.distributed as dist\nif dist.get_rank() == 0:\n"
    assert places(lint(text + "    dist.barrier(), '# holdfast: ignore[HANG101]'\n"))


@pytest.mark.parametrize(
    ("text", "why"),
    [("def f(:\n", "syntax"), ("x = 1\n  y = 2\n", "indent"), ("x = '\0'\n", "null")],
)
def test_a_script_that_is_no_python_is_an_error_at_its_line(
    text: str, why: str, lint: Lint
) -> None:
    found = lint(text)
    assert [f.rule for f in found] == ["PRE001"] and why in found[0].what.lower()


def test_a_script_that_is_too_deep_is_an_error_and_no_crash(lint: Lint) -> None:
    assert [f.rule for f in lint("x = " + "(" * 5000 + ")" * 5000)] == ["PRE001"]
    for length in (90, 350, 1_000, 5_000, 50_000):
        found = lint("import torch\nx = " + "+".join(["torch.ones(1)"] * length))
        assert [f.rule for f in found] in ([], ["PRE001"]), length


def test_a_file_nested_deeper_than_the_bound_is_counted_as_not_read(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = " + "+".join(["1"] * 1_000))
    found, project = check_script(script, [tmp_path])
    assert found == [] and project.skipped == 1


@pytest.mark.parametrize("content", [b"x = '\xff'\n", b"# coding: nope\n"], ids=["utf-8", "codec"])
def test_a_file_that_cannot_be_decoded_is_refused(content: bytes, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(content)
    with pytest.raises(UserError, match=r"train\.py: got a file that cannot be read"):
        check_script(script, [tmp_path])


def test_modules_beside_the_script_are_read_and_installed_ones_are_not(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "lib" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from ..top import x\nfrom . import leaf\n")
    (package / "leaf.py").write_text("import yaml, train\n")
    (tmp_path / "lib" / "top.py").write_text("x = 1\n")
    script = tmp_path / "train.py"
    script.write_text("import lib.inner, pytest\n")
    _found, project = check_script(script, [tmp_path])
    assert set(project.modules) == {"__main__", "lib", "lib.inner", "lib.top", "lib.inner.leaf"}


def test_the_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_MODULES", 3)
    for number in range(9):
        (tmp_path / f"m{number}.py").write_text(f"import m{number + 1}\n")
    _found, project = check_script(tmp_path / "m0.py", [tmp_path])
    assert len(project.modules) == 3 and project.skipped == 1


def test_every_rule_has_a_reason_a_fix_and_a_source() -> None:
    for rule in RULES.values():
        assert all((rule.finds, rule.why, rule.fix, rule.source)), rule.id
        assert not rule.why.endswith(".") and not rule.fix.endswith("."), rule.id
