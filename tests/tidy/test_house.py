"""The house rules that a machine can check: sizes, docstrings, names, and that docs are current."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools.dist import Distribution  # type: ignore[import-untyped]

from holdfast.orchestrator.api.v1alpha1.schema import json_schema
from tools.spec_page import reference_pages

from .language import findings

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 1000
MAX_FUNCTION_LINES = 70
MAX_PAGE_WORDS = 2500
MAX_WORDS = 40000
"""Words of README and docs together."""

# Lines of Python. A budget only falls: a feature pays with something that goes. The goal is 66,000
# for orchestrator and workers, 65,000 for tests.
BUDGETS = {
    "orchestrator": 53390,
    "workers": 26448,
    "tests": 90218,
    "orchestrator/api": 4505,
    "orchestrator/backends": 6280,
    "orchestrator/catalogue": 987,
    "orchestrator/cli": 9266,
    "orchestrator/client": 1070,
    "orchestrator/core": 7537,
    "orchestrator/explorer": 2346,
    "orchestrator/hosts": 3587,
    "orchestrator/journal": 852,
    "orchestrator/kube": 1608,
    "orchestrator/planner": 1510,
    "orchestrator/preflight": 3435,
    "orchestrator/protocol": 3275,
    "orchestrator/runtime": 5647,
    "orchestrator/ui": 950,
    "workers/agent": 10991,
    "workers/checkpoint": 4917,
    "workers/integrations": 2339,
    "workers/session": 4204,
    "workers/training": 3495,
}

# Parts of JobState, and the module of the core that alone writes each.
OWNERS = {
    "supply": "provisioning", "staging": "staging_interval", "given_up": "host_memory",
    "own": "own_checkpoints", "ledger": "recovery", "keeping": "keeping", "joining": "joining",
}  # fmt: skip

# Fields of JobState itself that several modules need changed, and the module that alone does it.
WRITERS = {
    "context": "generation hold intent intent_reason job needs_placement phase",
    "completion": "deadline_left_s finish_action outcome termination_reason traceback",
    "launching": "new_code resize_pending step",
}

# A docstring that begins with one of these continues the name of what it describes. It begins with
# a noun phrase or a verb instead.
NO_BEGINNING = (
    "After Also As At Before Between By For From How If In It Its Of On Once Only So That Then "
    "There They Those Until What When Where Whether Which While Who Why With Without"
)

# Names of variables that say how a thing came to be there, not what it is.
NO_VARIABLES = {"every", "found", "given", "known", "made", "one"}

# Spelled in pieces, so that this file does not name them either. The package index has another
# project called holdfast; ours is holdfast-train.
UNWANTED = [
    r"(?<![/\w-])holdfast(\[\w|==|>=|~=)|pip install '?holdfast\b(?!-)",
    *(rf"/{path}(?![\w-])" for path in ("work/main", "work/shared", "root/", "tmp/brief")),
]


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows or would add, in order."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("this is not a git checkout, so what belongs to the project is not known")
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file, from the outermost to the innermost."""
    return list(ast.walk(ast.parse(path.read_text())))


def lines_below(part: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in tracked(f"{part}/*.py"))


def test_every_part_keeps_its_budget_of_lines() -> None:
    over = {part: lines for part in BUDGETS if (lines := lines_below(part)) > BUDGETS[part]}
    assert over == {}, "cut as much as you add"


def test_each_part_of_a_jobs_state_is_written_by_its_owner_alone() -> None:
    changes = r"(\[.*\])? ([|+-]?= |, .* = )|\w+\.(append|clear|pop|setdefault|take|update)\("
    for part, owner in OWNERS.items():
        writes = re.compile(rf"\.{part}( = |\.\w*({changes}))|del .*\.{part}\.")
        core = tracked("orchestrator/core/*.py")
        assert {path.stem for path in core if writes.search(path.read_text())} == {owner}


def test_each_field_of_a_jobs_state_has_one_writer() -> None:
    core = tracked("orchestrator/core/*.py")
    for owner, fields in WRITERS.items():
        for field in fields.split():
            write = re.compile(rf"\bstate\.{field}\b[^=()\]\n]* [|+-]?= ")
            assert {path.stem for path in core if write.search(path.read_text())} == {owner}, field


def test_every_part_has_a_budget_of_lines() -> None:
    tops = [ROOT / "orchestrator", ROOT / "workers"]
    parts = {name(file.parent) for top in tops for file in top.glob("*/__init__.py")}
    assert parts - set(BUDGETS) == set()


def test_files_stay_below_1000_lines() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in tracked("*.py")}
    assert {n: lines for n, lines in lengths.items() if lines > MAX_FILE_LINES} == {}
    assert [n for n in lengths if n.startswith("examples/") and lengths[n] > 60] == []


def functions(pattern: str) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in tracked(pattern):
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield path, node


def test_functions_stay_below_70_lines() -> None:
    lengths = {(p, n.lineno): (n.end_lineno or 0) - n.lineno + 1 for p, n in functions("*.py")}
    assert [key for key, lines in lengths.items() if lines > MAX_FUNCTION_LINES] == []


def test_every_file_has_a_docstring() -> None:
    files = [path for path in tracked("*.py") if path.read_text().strip()]
    assert [p for p in files if not ast.get_docstring(nodes(p)[0])] == []  # type: ignore[arg-type]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Texts that stand alone, also below a constant or a field, with their lines."""
    for node in nodes(path):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


def test_a_docstring_begins_with_what_it_describes() -> None:
    beginnings = set(NO_BEGINNING.split())
    texts = [(path, line, text) for path in tracked("*.py") for line, text in docstrings(path)]
    assert [text for text in texts if text[2].split(None, 1)[0].rstrip(",:") in beginnings] == []


def test_a_function_is_called_by_what_it_returns_or_does() -> None:
    assert [(p, n.name) for p, n in functions("*.py") if n.name.startswith("_of_")] == []


def test_a_variable_is_called_by_what_it_is() -> None:
    wrong = [
        (name(path), node.lineno, node.id)
        for path in tracked("orchestrator/*.py", "workers/*.py")
        for node in nodes(path)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if node.id in NO_VARIABLES
    ]
    assert wrong == []


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path in tracked("orchestrator/*.py", "workers/*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name(path))
    assert {n: files for n, files in places.items() if len(files) > 1} == {}


def test_every_test_has_a_sentence_for_a_name() -> None:
    names = {n.name for _, n in functions("tests/**/test_*.py") if n.name.startswith("test_")}
    assert [name for name in names if len(name.split("_")) < 4] == []


def test_unit_tests_mirror_the_tree_of_the_code() -> None:
    """Each directory is a package of the code, and a test named like a module of the package or of
    one below it stands in its directory."""
    modules = {p.relative_to(ROOT) for p in tracked("orchestrator/*.py", "workers/*.py")}
    packages = {path.parent for path in modules}
    wrong = []
    for path in tracked("tests/unit/*/test_*.py"):
        place = path.parent.relative_to(ROOT / "tests/unit")
        package = place if place.parts[0] == "workers" else Path("orchestrator") / place
        module = path.name.removeprefix("test_")
        below = [m for m in modules if m.name == module and package in m.parents]
        if package not in packages or (below and package / module not in below):
            wrong.append(name(path))
    assert wrong == []


def test_no_file_names_this_machine_or_the_package_of_another_project() -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name(path)}: {p}" for p in UNWANTED if re.search(p, text)]
    assert found == []


def test_no_exception_is_swallowed_silently() -> None:
    assert [
        f"{name(path)}:{node.lineno}"
        for path in tracked("orchestrator/*.py", "workers/*.py")
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(line, (ast.Pass, ast.Continue)) for line in node.body)
    ] == []


def test_an_installed_package_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks setuptools what a wheel has; tests/e2e/local/test_wheel.py builds one."""
    monkeypatch.chdir(ROOT)
    project = Distribution()
    project.parse_config_files()
    command = project.get_command_obj("build_py")
    command.ensure_finalized()
    files = {package: names for package, _, _, names in command.get_data_files_without_manifest()}
    assert files["holdfast"] == ["py.typed"]


def test_the_reference_pages_are_generated_from_the_models() -> None:
    for end, text in reference_pages().items():
        page = ROOT / f"docs/user/job-spec{end}.md"
        assert page.read_text() == text, "run: python -m tools.spec_page"


def test_pages_are_short() -> None:
    pages = [ROOT / "README.md", *tracked("docs/*.md")]
    words = {name(page): len(page.read_text().split()) for page in pages}
    assert {page: count for page, count in words.items() if count > MAX_PAGE_WORDS} == {}
    assert sum(words.values()) <= MAX_WORDS, "cut as much as you add"


def test_every_field_of_the_spec_is_described() -> None:
    schema = json_schema()
    silent = []
    for model, definition in schema["$defs"].items():
        for field, node in definition.get("properties", {}).items():
            refers = "$ref" in node or any("$ref" in choice for choice in node.get("anyOf", ()))
            if not node.get("description") and not refers:
                silent.append(f"{model}.{field}")
    assert silent == []


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    yield from re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_links_in_the_docs_have_targets() -> None:
    broken = []
    for page in tracked("*.md"):
        for link in links(page):
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{name(page)}: {link}")
    assert broken == []


def test_files_named_in_the_docs_exist() -> None:
    """`orchestrator/core/controller.py` in backticks is a promise."""
    pattern = re.compile(r"`((?:orchestrator|workers|tests|docs|examples|bench)/[\w./-]+)`")
    named = [(page, p) for page in tracked("*.md") for p in pattern.findall(page.read_text())]
    assert [(page, path) for page, path in named if not (ROOT / path).exists()] == []


def flows() -> list[tuple[int, str]]:
    """The flows of the architecture page: the number of hops in the heading, and the text."""
    text = (ROOT / "docs/contributing/architecture.md").read_text()
    parts = re.split(r"^### ", text[text.index("## Five flows") :], flags=re.MULTILINE)[1:]
    return [
        (int(re.search(r"\((\d+) hops", head).group(1)), body)  # type: ignore[union-attr]
        for head, body in (part.split("\n", 1) for part in parts)
    ]


def test_the_flows_of_the_architecture_page_have_as_many_hops_as_they_say() -> None:
    assert len(flows()) == 5
    assert [number for number, _ in flows()] == [body.count("->") for _, body in flows()]


def test_the_hops_of_the_architecture_page_are_in_the_code() -> None:
    files = tracked("orchestrator/*.py", "workers/*.py")
    every = [node for path in files for node in nodes(path)]
    known = {
        node.name
        for node in every
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    } | {node.id for node in every if isinstance(node, ast.Name)}
    known |= {part for path in files for part in path.relative_to(ROOT).with_suffix("").parts}
    hops = [hop for _, body in flows() for hop in re.findall(r"`([\w./]+)`", body)]
    missing = [hop for hop in hops if not set(re.split(r"[./]", hop)) <= known]
    assert len(hops) > 100 and missing == []


def test_no_word_of_the_old_dialect_comes_back() -> None:
    assert list(findings([])) == [], "docs/contributing/glossary.md has the terms to use"
