"""Has a script that loads a checkpoint of DeepSpeed read it also with another number of ranks, see
workers/integrations/deepspeed_sizes.py.

DeepSpeed may be imported already, or be imported by the script at any time, or never. Only the
standard library is imported here.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ENGINE = "deepspeed.runtime.engine"


def install() -> None:
    """Before the script runs."""
    engine = sys.modules.get(ENGINE)
    if engine is not None:
        _adapt(engine)
    else:
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """Adapts the module of the engine right after its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AdaptingLoader(spec.loader)  # type: ignore[assignment]
        return spec


class _AdaptingLoader:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _adapt(module)


def _adapt(engine: ModuleType) -> None:
    """What cannot be adapted works as before, so it is no reason to fail."""
    try:
        sizes = importlib.import_module("holdfast.workers.integrations.deepspeed_sizes")
        sizes.read_other_sizes(engine.DeepSpeedEngine)
    except Exception as error:
        print(f"holdfast: checkpoints of DeepSpeed are read by as many ranks as wrote them only "
              f"({type(error).__name__}: {error})", file=sys.stderr)  # fmt: skip
