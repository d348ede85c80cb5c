"""The pipeline axis: which blocks of the transformer are on which rank, and in which order its
micro-batches pass through them, by the schedules of torch.distributed.pipelining.

With N stages, stage k has an equal share of the blocks, in order; the first has the embedding too,
the last norm and head, and computes the loss. Rank r of R has the stages r, r + R, ..., or with the
V schedule r and N - 1 - r, so that the loss is computed where the samples begin. A rank's model
keeps the parameter names of the whole one, so that any other mesh can read its checkpoints.

Sources of the schedules: Huang et al., "GPipe", 2019; Narayanan et al., "Efficient large-scale
language model training on GPU clusters using Megatron-LM", 2021 (1F1B and interleaved); Qi et al.,
"Zero bubble pipeline parallelism", 2023, and "Pipeline parallelism with controllable memory", 2024
(V).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

from holdfast.orchestrator.api.v1alpha1 import Parallelism
from holdfast.workers.session import Session
from holdfast.workers.training.data import MicroBatch, divide_batches
from holdfast.workers.training.models.transformer import Transformer

_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "interleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "zbvZeroBubble": "ScheduleZBVZeroBubble",
}
"""spec.parallelism.pipeline.schedule -> class of torch.distributed.pipelining."""

Loss = Callable[[Tensor, MicroBatch], Tensor]
Arguments = Callable[[MicroBatch], dict[str, Any]]
"""Arguments of the head beside activations."""


class StageModule(Transformer):
    """Consecutive parts of a model: tokens or activations -> activations, or the loss as (1,)."""

    def __init__(self, model: Transformer, blocks: Sequence[nn.Module], first: bool, last: bool):
        nn.Module.__init__(self)
        self.config, self.sequence_parts = model.config, model.sequence_parts
        self.embedding = model.embedding if first else None
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = (model.norm, model.head) if last else (None, None)
        self.next_batch: Callable[[], tuple[dict[str, Any], Callable[[Tensor], Tensor]]] | None
        self.next_batch = None
        """Last stage only: arguments of the head for the next micro-batch, and the loss of what
        the head gives."""
        self.positions_t: Tensor | None = None
        """Positions of the tokens of all micro-batches in their sequences; None: they are whole."""

    def forward(self, tokens_bt: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.next_batch is None:
            return super().forward(tokens_bt, self.positions_t)
        of_head, loss_of = self.next_batch()
        loss = loss_of(super().forward(tokens_bt, self.positions_t, **of_head))
        # torch concatenates the outputs of the last stage, and detaches them: not a scalar or view.
        return loss.reshape(1).clone()


class _Stage(pipelining.PipelineStage):
    """Stage without torch 2.11's first messages: before its first step torch sends one in each
    direction between neighbouring stages, so that connections exist. The two stages in the middle
    of a V are on one rank, and gloo has no connection from a rank to itself."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """No operations; torch 2.15 lacks this method and never calls it."""
        ops = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [op for op in ops if op.group_peer != self.group_rank]


class Pipeline:
    """The stages of one rank."""

    def __init__(self, model: Transformer, session: Session, parallelism: Parallelism) -> None:
        """Takes from `model` what other ranks have. Call it before the model is wrapped."""
        self._model, self._session = model, session
        self.arguments: Arguments = lambda batch: {}
        self._schedule_class: Any = getattr(pipelining, _SCHEDULES[parallelism.pipeline_schedule])
        self._folded = parallelism.pipeline_schedule == "zbvZeroBubble"
        self._single = parallelism.stages_per_rank == 1
        self._num_stages = parallelism.num_stages
        self._at = session.shape.coordinates(session.rank)["pipeline"]
        self._parts: dict[int, StageModule] = {}
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._batches: Iterator[MicroBatch] = iter(())
        self._loss_of: Loss | None = None
        self._scale = 1.0
        mine, last = self._mine(), self._num_stages - 1
        blocks_per_stage = len(model.blocks) // self._num_stages
        for number in range(len(model.blocks)):
            if number // blocks_per_stage not in mine:
                delattr(model.blocks, str(number))  # not `del`, which would renumber the others
        if 0 not in mine:
            model.embedding = None
        if last not in mine:
            model.norm = model.head = None

    def _mine(self) -> list[int]:
        """The stages of this rank."""
        return [n for n in range(self._num_stages) if self._rank_of(n) == self._at]

    def divide(self) -> list[nn.Module]:
        """The stages of this rank as modules, in order: roots for fully_shard. Call it once the
        blocks are wrapped."""
        blocks, mine = list(self._model.blocks), self._mine()
        share = len(blocks) // len(mine)
        for place, number in enumerate(mine):
            of_stage = blocks[place * share : (place + 1) * share]
            last = number == self._num_stages - 1
            part = StageModule(self._model, of_stage, number == 0, last)
            part.next_batch = self._next_batch if last else None
            part.register_forward_hook(lambda *_: self._session.tick())
            self._parts[number] = part
        return list(self._parts.values())

    def train(
        self, batches: Sequence[MicroBatch], loss_of: Loss, dtype: torch.dtype, scale: float
    ) -> Tensor:
        """Gradients of `scale` times the sum of the losses over all micro-batches. `dtype` is that
        of activations. Returns the sum of the losses, on ranks without the last stage 0: a scalar
        on the session's device."""
        device = self._session.device
        whole = [batch.to(device) for batch in self._filled(batches)]
        losses: list[Tensor] = []
        with divide_batches(self._context, whole) as filled:
            schedule = self._schedule(len(filled), filled[0].inputs_bt, dtype)
            self._give(filled, loss_of, scale)
            inputs = [torch.cat([batch.inputs_bt for batch in filled])] if 0 in self._parts else []
            last = self._num_stages - 1 in self._parts
            target = torch.zeros(len(filled)) if last else None  # not used, but torch requires one
            schedule.step(*inputs, target=target, losses=losses)
        total = torch.zeros((), device=device)
        for loss in losses:
            total += loss.detach().squeeze() / scale
        return total

    def evaluate(self, batches: Sequence[MicroBatch], loss_of: Loss, dtype: torch.dtype) -> Tensor:
        """The sum of the losses as in `train`, without gradients. Not by a schedule of torch: a V
        cannot pass forwards alone."""
        total = torch.zeros((), device=self._session.device)
        sending: list[tuple[Any, Tensor]] = []
        for batch in batches:
            whole = [batch.to(self._session.device)]
            with divide_batches(self._context, whole) as (part,):
                self._give([part], loss_of, 1.0)
                total += self._evaluate(part.inputs_bt, dtype, sending)
        _wait(sending)
        return total

    def _evaluate(
        self, inputs_bt: Tensor, dtype: torch.dtype, sending: list[tuple[Any, Tensor]]
    ) -> Tensor:
        """The loss of the micro-batch that was given, on other ranks than the last stage's 0.
        `sending`: what is on its way to the next stage, with the tensors that must stay."""
        device = self._session.device
        x_btd, loss = inputs_bt, torch.zeros((), device=device)
        for number, part in self._parts.items():
            before, after = self._rank_of(number - 1), self._rank_of(number + 1)
            if number > 0 and before != self._at:
                x_btd = self._passed(inputs_bt, dtype, device)
                dist.recv(x_btd, group=self._group, group_src=before)
            x_btd = part(x_btd)
            if part.next_batch is not None:
                loss = x_btd.squeeze()
            elif after != self._at:
                _wait(sending)
                sending.append((dist.isend(x_btd, group=self._group, group_dst=after), x_btd))
        return loss

    def _give(self, batches: Sequence[MicroBatch], loss_of: Loss, scale: float) -> None:
        """Give the stages what they compute next."""
        self._batches, self._loss_of, self._scale = iter(batches), loss_of, scale
        for part in self._parts.values():
            part.positions_t = batches[0].positions_t

    def _rank_of(self, stage: int) -> int:
        """The rank in this pipeline that has a stage."""
        ranks = self._session.shape.pipeline
        if self._folded and stage >= ranks:
            return self._num_stages - 1 - stage
        return stage % ranks

    def _next_batch(self) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
        """Every schedule passes the micro-batches through a stage in order."""
        batch, loss_of, scale = next(self._batches), self._loss_of, self._scale
        assert loss_of is not None
        return self.arguments(batch), lambda output: loss_of(output, batch) * scale

    def _filled(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Micro-batches of one size, and as many as the schedule can pass on: at least one for each
        rank, and a multiple with several stages on a rank. Samples that are added have weight 0."""
        size, ranks = len(batches[0].inputs_bt), self._session.shape.pipeline
        missing = max(ranks - len(batches), 0) if self._single else -len(batches) % ranks
        none = MicroBatch(*(part[:0] for part in _parts(batches[0])))
        return [_padded(batch, size) for batch in [*batches, *[none] * missing]]

    def _schedule(self, num: int, inputs_bt: Tensor, dtype: torch.dtype) -> Any:
        """A schedule for this number of micro-batches, made once. Shapes are given, so that torch
        need not compute a step to find them."""
        key = (num, *inputs_bt.shape)
        if key in self._schedules:
            return self._schedules[key]
        # Contiguous, as `train` passes them; empty_like has the strides of a slice in torch 2.11.
        tokens = torch.empty(inputs_bt.shape, dtype=inputs_bt.dtype, device="meta")
        passed = self._passed(inputs_bt, dtype, torch.device("meta")).requires_grad_()
        loss = torch.empty(1, device="meta", requires_grad=True)
        stages = [
            _Stage(
                part,
                number,
                self._num_stages,
                self._session.device,
                input_args=tokens if number == 0 else passed,
                output_args=loss if part.next_batch is not None else passed,
                group=self._group,
            )
            for number, part in self._parts.items()
        ]
        schedule = self._schedule_class(
            stages[0] if self._single else stages,
            num,
            loss_fn=lambda output, _target: output,
            scale_grads=False,
        )
        self._schedules[key] = schedule
        return schedule

    def _passed(self, inputs_bt: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for what one stage passes to the next: (B, T, D), T divided over a tensor axis."""
        batch, length = inputs_bt.shape
        length //= self._model.sequence_parts
        return torch.empty(batch, length, self._model.config.dim, dtype=dtype, device=device)

    @property
    def _context(self) -> DeviceMesh | None:
        return self._session.meshes.axis("context") if self._session.shape.context > 1 else None

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._session.meshes.axis("pipeline").get_group()


def _wait(sending: list[tuple[Any, Tensor]]) -> None:
    while sending:
        sending.pop()[0].wait()


def _padded(batch: MicroBatch, num_samples: int) -> MicroBatch:
    """The batch with samples of zeros, whose weight is 0, up to this number of samples."""
    missing = num_samples - len(batch.inputs_bt)
    if not missing:
        return batch
    parts = _parts(batch)
    return MicroBatch(
        *(torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) for part in parts)
    )


def _parts(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """All but positions: the sequences are whole, and divided over a context axis later."""
    return batch.inputs_bt, batch.targets_bt, batch.weights_b
