"""AdamW with moments of 8 bits, on torchao's quantization and step.

A moment is a table index of 8 bits for each value, and a scale for each 256 values of a row.
Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, sections 2.1 and 2.2.
torchao's own optimizer begins a block every 256 values of a rank's part, so its state is of one
mesh; here blocks end with the row, and FSDP2 divides rows, so the state is of any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint.tensors import empty_on_mesh, local_of

BLOCK = 256
MIN_NUMEL = 4096
"""Smaller parameters keep moments like themselves, as in torchao and bitsandbytes."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments of 8 bits for matrices of at least 4,096 values whose rows are multiples
    of 256; those of other parameters are like the parameter, which may be this rank's part of a
    DTensor (its `whole`, see Session.shards).

    Raises UserError where torchao is not installed.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float = 1e-8
    ) -> None:
        self._quantized, self._step_one = _torchao_functions()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def state_placements(self, key: str, whole: DTensor) -> Sequence[Any] | None:
        """Placements of a parameter's state of this key in checkpoints (see optimizer_state.py)."""
        return whole.placements if key.endswith("_scales") else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Raises ValueError for a closure, which would need a second backward."""
        if closure is not None:
            raise ValueError("AdamW8bit takes no closure")
        for group in self.param_groups:
            rate = torch.tensor(group["lr"], dtype=torch.float32)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(_moments(parameter))
                state["step"] += 1
                if local_of(parameter).numel():
                    self._step_parameter(parameter, state, group, rate)
        return None

    def _step_parameter(
        self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], rate: Tensor
    ) -> None:
        assert parameter.grad is not None
        local = local_of(parameter)
        beta1, beta2 = group["betas"]
        self._step_one(
            local,
            local_of(parameter.grad),
            state["step"].to(local.device),
            self._moment(state, "exp_avg", True, local.dtype),
            self._moment(state, "exp_avg_sq", False, local.dtype),
            None,  # amsgrad
            rate.to(local.device),
            beta1,
            beta2,
            group["weight_decay"],
            group["eps"],
            True,  # decoupled weight decay
            False,  # stochastic rounding
        )

    def _moment(
        self, state: dict[str, Tensor], key: str, signed: bool, dtype: torch.dtype
    ) -> Tensor:
        """The tensor as torchao takes it; what it writes lands in the state."""
        if key in state:
            return local_of(state[key])
        codes, scales = local_of(state[f"{key}_codes"]), local_of(state[f"{key}_scales"])
        return self._quantized(codes, scales.view(-1), signed, dtype)


def _moments(parameter: Tensor) -> dict[str, Tensor]:
    """Both moments of a parameter before its first step, laid out like it on its mesh."""
    state = {"step": torch.zeros((), dtype=torch.float32)}
    whole = getattr(parameter, "whole", parameter)
    in_8_bits = whole.ndim == 2 and whole.shape[1] % BLOCK == 0 and whole.numel() >= MIN_NUMEL
    for key in ("exp_avg", "exp_avg_sq"):
        if in_8_bits:
            state[f"{key}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"{key}_scales"] = _scales(whole, parameter.device)
        else:
            state[key] = torch.zeros_like(parameter)
    return state


def _scales(whole: Tensor, device: torch.device) -> Tensor:
    rows, columns = whole.shape
    shape = (rows, columns // BLOCK)
    if not isinstance(whole, DTensor):
        return torch.zeros(shape, device=device)
    scales = empty_on_mesh(shape, torch.float32, device, whole.device_mesh, whole.placements)
    scales._local_tensor.zero_()
    return scales


def _torchao_functions() -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """A moment from its codes and scales, and the step of one parameter, which is compiled for
    GPUs: its intermediate values are in float32, and eager steps would keep each of them."""
    try:
        from torchao.optim.adam import single_param_adam
        from torchao.optim.quant_utils import create_dynamic_map
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise UserError(
            f"entrypoint.recipe.config.optimizer.adamw8bit: got it without torchao ({error}); "
            "expected it in the environment of the workers; pip install torchao, or use adamw"
        ) from None

    @functools.cache
    def table(signed: bool, device: torch.device) -> Tensor:
        return torch.tensor(create_dynamic_map(signed=signed), device=device)

    def quantized(codes: Tensor, scales: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
        state: Tensor = OptimState8bit(codes, scales, table(signed, codes.device), signed, dtype)
        return state

    compiled = torch.compile(single_param_adam, fullgraph=True, dynamic=False)

    def step_one(parameter: Tensor, *rest: Any) -> None:
        (compiled if parameter.is_cuda else single_param_adam)(parameter, *rest)

    return quantized, step_one
