"""The architectures of the catalogue have as many parameters as their authors published."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.catalogue.load import load_catalogue

from .counting import parameters

EXACT = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_241_732_096,
}
"""Sums over the tensors of the published checkpoints, without rotary buffers."""
IN_MILLIONS = {"gpt3-13b": 12_850, "gpt3-175b": 174_600}
"""arXiv 2005.14165, table D.1, in millions, rounded by the authors."""


@pytest.mark.parametrize("name", EXACT)
def test_a_model_has_the_parameters_of_its_published_checkpoint(name: str) -> None:
    assert parameters(load_catalogue().architecture(name)) == EXACT[name]


@pytest.mark.parametrize("name", IN_MILLIONS)
def test_a_model_without_a_checkpoint_has_the_parameters_of_its_paper(name: str) -> None:
    counted = parameters(load_catalogue().architecture(name)) / 1e6
    assert counted == pytest.approx(IN_MILLIONS[name], rel=5e-4)


def test_every_architecture_has_a_published_count_and_a_source() -> None:
    found = load_catalogue().architectures
    assert set(found) == {*EXACT, *IN_MILLIONS}
    assert all(one.source for one in found.values())
