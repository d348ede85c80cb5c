"""Cross entropy of each token, whole and in chunks, and the z-loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from holdfast.orchestrator.api.v1alpha1.recipe import Model
from holdfast.workers.training.initial_values import fill
from holdfast.workers.training.loss import token_losses
from holdfast.workers.training.models.transformer import Transformer


def test_the_z_loss_is_the_square_of_log_z() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    targets = torch.tensor([2, 0])
    plain = F.cross_entropy(logits, targets, reduction="none")
    assert torch.equal(token_losses(logits, targets), plain)
    log_z = logits.exp().sum(1).log()
    assert torch.allclose(token_losses(logits, targets, 0.1), plain + 0.1 * log_z**2)
    assert token_losses(logits.bfloat16(), targets).dtype == torch.float32


def model_with_values(vocab: int) -> Transformer:
    model = Transformer(Model(dim=32, num_layers=1, num_heads=2, vocab_size=vocab))
    for name, parameter in model.named_parameters():
        fill(parameter, 0, name, model.standard_deviation(name))
    return model


@pytest.mark.parametrize("chunk", [1, 5, 7, 18, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_losses_and_gradients_in_chunks_are_those_of_the_whole(chunk: int, z_loss: float) -> None:
    tokens = torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    whole, parts = model_with_values(64), model_with_values(64)
    expected = token_losses(whole(inputs).flatten(0, 1), targets.flatten(), z_loss)
    found = parts(inputs, targets_bt=targets, chunk_tokens=chunk, z_loss=z_loss)
    assert torch.allclose(found.flatten(), expected, atol=1e-6)
    expected.mean().backward()
    found.mean().backward()
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=1e-6)


def test_no_more_logits_than_those_of_a_chunk_are_kept_or_made() -> None:
    vocab, chunk = 1024, 4
    model = model_with_values(vocab)
    tokens = torch.randint(0, vocab, (2, 33), generator=torch.Generator().manual_seed(0))
    made: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple | list) else [out]:
                if isinstance(one, torch.Tensor) and one.ndim and one.shape[-1] == vocab:
                    made.append(one.numel() // vocab)
            return out

    with Sizes():
        losses = model(tokens[:, :-1], targets_bt=tokens[:, 1:], chunk_tokens=chunk)
        losses.mean().backward()
    assert set(made) == {chunk, 32}  # 32 rows: the weight and its gradient, transposed
    kept: list[int] = []

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        model(tokens[:, :-1], targets_bt=tokens[:, 1:], chunk_tokens=chunk)
    assert max(kept) <= vocab * 32  # the weights, not 64 x 1024 logits
