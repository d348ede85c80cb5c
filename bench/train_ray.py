"""The workload of bench/train.py under Ray Train v2: TorchTrainer and its training function.

Checkpoints follow Ray Train's documentation for sharded state: dcp.async_save into the run's
storage, reported at once with an upload function that waits for it. It only records the call of
fit() and finished steps.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

MANY = 1_000_000
"""Failures that Ray Train may recover from."""


def train(config: dict[str, Any]) -> None:
    """Program of every rank. Imports are inside: they belong to the cost of a restart."""
    import ray.train
    import torch

    from bench.timeline import Recorder
    from bench.train import Trainer
    from holdfast import session
    from holdfast.orchestrator.api.v1alpha1 import Pretrain

    torch.set_num_threads(1)
    s = session.init(shard=config["shard"])  # Ray Train has made the process group
    checkpoint = ray.train.get_checkpoint()
    trainer = Trainer(s, Pretrain(steps=config["steps"]), checkpoint is None, local=False)
    keeper = Keeper(trainer)
    start = keeper.load(Path(checkpoint.path)) if checkpoint else 0
    recorder = Recorder(config["timeline"])
    for step in range(start, config["steps"]):
        trainer.step(step)
        recorder.finished(step)
        if (step + 1) % config["save_every"] == 0:
            keeper.save(step)


class Keeper:
    """Sharded checkpoints in the directory of Ray Train's run, the only place that it accepts."""

    def __init__(self, trainer: Any) -> None:
        import ray.train
        import torch.distributed as dist

        self._model, self._optimizer = trainer.model, trainer.optimizer
        self._directory = Path(ray.train.get_context().get_storage().experiment_fs_path)
        self._group = dist.new_group(backend="gloo")
        self._pending: Any = None

    def load(self, path: Path) -> int:
        """Returns the step to continue with."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=str(path))
        set_state_dict(
            self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        return int(path.name.rpartition("-")[2]) + 1

    def save(self, step: int) -> None:
        import ray.train
        import torch.distributed.checkpoint as dcp
        from ray.train import Checkpoint, CheckpointUploadMode
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if self._pending is not None:
            self._pending.result()
        model, optimizer = get_state_dict(self._model, self._optimizer)
        # A later attempt at the same step must not write into what an earlier one has left.
        path = self._directory / f"attempt-{os.environ['MASTER_PORT']}-step-{step:06d}"
        self._pending = pending = dcp.async_save(
            {"model": model, "optim": optimizer},
            checkpoint_id=str(path),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )

        def wait(checkpoint: Checkpoint, _name: str) -> Checkpoint:
            pending.result()
            return checkpoint

        ray.train.report(
            {"step": step},
            checkpoint=Checkpoint(str(path)),
            checkpoint_dir_name=path.name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=wait,
            delete_local_checkpoint_after_upload=False,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="of the running cluster")
    parser.add_argument("--begun", type=Path, required=True, help="file for the time of fit()")
    parser.add_argument("--timeline", required=True)
    parser.add_argument("--checkpoints", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--shard", type=int, required=True)
    parser.add_argument("--elastic", action="store_true", help="go on with half the workers")
    options = parser.parse_args()

    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address=options.address)
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(options) | {"begun": str(options.begun)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=(2, 4) if options.elastic else 4, resources_per_worker={"CPU": 1}
        ),
        run_config=RunConfig(
            name="bench",
            storage_path=options.checkpoints,
            failure_config=FailureConfig(max_failures=MANY),
        ),
    )
    options.begun.write_text(f"{time.time():.6f}")
    trainer.fit()


if __name__ == "__main__":
    main()
