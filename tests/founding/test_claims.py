"""Figures that cannot be are refused with the bound that they break."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.catalogue.load import load_catalogue
from holdfast.orchestrator.planner.model import count_parameters, flops_per_token
from holdfast.orchestrator.planner.workload import Workload

from .claims import ceiling, check_epoch, check_throughput, least_flops_per_token

CATALOGUE = load_catalogue()
H100 = CATALOGUE.device("H100-80")


def workload(name: str = "llama3-8b", sequence: int = 8192, **changed: object) -> Workload:
    model = CATALOGUE.architecture(name)
    return Workload(
        model=model,
        counts=count_parameters(model),
        sequence_length=sequence,
        global_batch=8,
        **changed,  # type: ignore[arg-type]
    )


def test_a_claim_above_the_peak_is_refused_with_the_ceiling() -> None:
    work = workload()
    most = ceiling(work, 8, H100)
    message = f"they compute {most:,.0f}; the claim is 200% of that"
    with pytest.raises(ValueError, match="8 x H100-80 cannot train llama3-8b") as caught:
        check_throughput(work, 8, H100, 2 * most)
    assert message in str(caught.value)


def test_a_claim_below_the_peak_gets_its_share() -> None:
    work = workload()
    found = check_throughput(work, 8, H100, ceiling(work, 8, H100) / 4)
    assert found.share == pytest.approx(0.25)


def test_the_ceiling_is_peak_over_the_products_of_a_token() -> None:
    """TorchTitan's 8B on 8 H100 at 5,762 tokens/s a GPU is far below it."""
    work = workload()
    dense = 6 * (work.counts.total - work.counts.embedding)
    causal = 3 * 32 * 2 * 4096 * 8192
    assert least_flops_per_token(work) == dense + causal
    assert least_flops_per_token(work) < flops_per_token(work.model, 8192)
    assert ceiling(work, 8, H100) == pytest.approx(8 * 989e12 / (dense + causal))
    assert 0.2 < check_throughput(work, 8, H100, 8 * 5762).share < 0.5


def test_products_in_float8_have_a_higher_ceiling() -> None:
    assert ceiling(workload(float8=True), 1, H100) > 2 * ceiling(workload(), 1, H100) * 0.99
    with pytest.raises(ValueError, match="A100-80 has no peak for float8"):
        ceiling(workload(float8=True), 1, CATALOGUE.device("A100-80"))


@pytest.mark.parametrize("tokens", [0.0, -1.0, float("nan")])
def test_a_claim_that_is_no_rate_is_refused(tokens: float) -> None:
    with pytest.raises(ValueError, match="expected a number above 0"):
        check_throughput(workload(), 8, H100, tokens)


def test_an_epoch_of_fewer_samples_than_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"33,696 steps of 1\.48 samples: 8 data-parallel ranks"):
        check_epoch(50_000, 7.2, 1.3, 8)
    assert check_epoch(50_000, 1, 1, 8) == pytest.approx(50_000 / 3600)
