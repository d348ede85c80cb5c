"""Patches frameworks when a script imports them (workers/integrations/patches.py), and has saves of
torch and safetensors raise audit events (file_audit.py).

A framework may be imported already, or be imported by the script at any time, or never.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from holdfast.orchestrator.parts import is_installed, load

PATCHES = {
    "deepspeed.runtime.engine": "resumed_deepspeed",
    "transformers.trainer": "resumed_transformers",
    "transformers.trainer_callback": "resumed_transformers",
    "lightning.pytorch.trainer.connectors.checkpoint_connector": "resumed_lightning",
    "pytorch_lightning.trainer.connectors.checkpoint_connector": "resumed_lightning",
}
"""Module of a framework -> the file in workers/integrations that patches it."""
SAVES = "holdfast.saves"
"""Audit event of a save that no event of Python shows, see file_audit.py."""


def install(*, again: bool = False) -> None:
    """Install all before the script runs, or runs `again` in this process: a resume is patched from
    the second launch on. `checkpoint.guard: {never: {}}` skips this."""
    if not again:
        _when_imported("torch.serialization", _audit_torch_save)
        _when_imported("safetensors", _audit_safetensors)
    for name in PATCHES:
        if not again or name in sys.modules:
            _when_imported(name, _patch)


def _when_imported(name: str, adapt: Callable[[ModuleType], None]) -> None:
    """Adapt a module when it is imported. One that cannot be adapted works as before."""

    def try_to_adapt(module: ModuleType) -> None:
        try:
            adapt(module)
        except Exception as error:
            kind = type(error).__name__
            print(f"holdfast: {name} is not patched ({kind}: {error})", file=sys.stderr)

    if (module := sys.modules.get(name)) is not None:
        try_to_adapt(module)
    else:
        sys.meta_path.insert(0, _Watch(name, try_to_adapt))


class _Watch:
    """Adapts a module right after its import."""

    def __init__(self, name: str, adapt: Callable[[ModuleType], None]) -> None:
        self._name, self._adapt = name, adapt

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_adapt(module: ModuleType) -> None:
                execute(module)
                self._adapt(module)

            spec.loader.exec_module = execute_and_adapt  # type: ignore[method-assign]
        return spec


def _audit_torch_save(module: ModuleType) -> None:
    """torch.save opens its file in C++, where Python has no audit event (see file_audit.py)."""
    inner = module._open_zipfile_writer_file.__init__

    def begin(self: Any, name: Any) -> None:
        sys.audit(SAVES, name)
        inner(self, name)

    module._open_zipfile_writer_file.__init__ = begin


def _audit_safetensors(module: ModuleType) -> None:
    """Audit safetensors, which reads and writes in Rust."""
    inner, write = module.safe_open, getattr(module, "serialize_file", None)

    def safe_open(filename: Any, *given: Any, **named: Any) -> Any:
        sys.audit("open", filename, "rb", 0)
        return inner(filename, *given, **named)

    def serialize_file(tensors: Any, filename: Any, *given: Any, **named: Any) -> Any:
        sys.audit(SAVES, filename)
        return write(tensors, filename, *given, **named)  # type: ignore[misc]

    for user in filter(None, (module, sys.modules.get("safetensors.torch"))):
        for old, new in ((inner, safe_open), (write, serialize_file)):
            if old is not None and getattr(user, new.__name__, None) is old:
                setattr(user, new.__name__, new)


def _patch(module: ModuleType) -> None:
    if is_installed(f"holdfast.workers.integrations.{PATCHES[module.__name__]}"):
        load("holdfast.workers.integrations.patches:apply")(module, PATCHES[module.__name__])
