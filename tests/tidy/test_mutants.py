"""The mutation run: that every change is made where its name says, and that a check judges it."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.core.hang import facts
from tests.mutants.__main__ import equivalent, every_mutant, judged
from tests.mutants.checks import Check
from tests.mutants.mutate import mutants

SOURCE = """
class Box:
    def __init__(self):
        self.limit = 2

    @property
    def small(self):
        return self.limit < 2

def kept(numbers):
    def low(number):
        return number < 3
    return [number for number in numbers if low(number) and number != 1]
"""


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("m.py:Box.__init__: self.limit = 2 -> deleted", "no attribute"),
        ("m.py:Box.small: self.limit < 2 -> self.limit <= 2", "True [2]"),
        ("m.py:kept: number < 3 -> number <= 3", "False [2, 3]"),
        ("m.py:kept: number != 1 -> number == 1", "False [1]"),
        (
            "m.py:kept: low(number) and number != 1 -> low(number) or number != 1",
            "False [1, 2, 3, 4]",
        ),
    ],
)
def test_a_change_is_made_in_the_function_that_it_names(name: str, shown: str) -> None:
    (mutant,) = [one for one in mutants("m.py", SOURCE) if one.name == name]
    space: dict[str, Any] = {}
    exec(SOURCE, space)
    target: Any = space["kept"]
    if mutant.function != "kept":
        target = vars(space["Box"])[mutant.function.removeprefix("Box.")]
    (target.fget if isinstance(target, property) else target).__code__ = mutant.code("m.py")
    try:
        found = f"{space['Box']().small} {space['kept']([1, 2, 3, 4])}"
    except AttributeError:
        found = "no attribute"
    assert found == shown


def test_the_first_check_that_fails_or_never_ends_has_noticed_the_change() -> None:
    found = every_mutant("hang/facts.py:condition: if 'busy' in every")
    (mutant,) = [one for one in found if "if True" in one.change]

    def fails() -> None:
        assert facts.condition([]) == "idle"

    def never_ends() -> None:
        while facts.condition([]) == "busy":
            pass

    passes = Check("passes", lambda: None, "", {})
    for wanted in (Check("fails", fails, "", {}), Check("never ends", never_ends, "", {})):
        assert judged(mutant, [passes, wanted]) == wanted.name
    assert judged(mutant, [passes]) == ""
    assert facts.condition([]) == "idle", "here it is as it was"


def test_names_are_unique_and_equivalent_ones_exist() -> None:
    names = [mutant.name for mutant in every_mutant("")]
    assert len(names) == len(dict.fromkeys(names))
    assert [name for name in equivalent() if name not in names] == []
