"""Names of a model's parameters and buffers, without the parts that wrappers such as DDP,
torch.compile and FSDP add, so that checkpoints do not depend on the wrapping."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from holdfast.orchestrator.errors import UserError

from . import module_state

_MARKS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))
"""Children that torch.compile, activation checkpointing and FSDP1 add. The child of DDP is called
`module`, like a child that a model may have itself: there the parent's type decides."""
_DDP_CHILD = "module"


def plain_name(name: str) -> str:
    """A name without the parts of wrappers other than DDP."""
    return ".".join(part for part in name.split(".") if part not in _MARKS)


class ParamNames:
    """All parameters, each once, and persistent buffers of a model. Raises UserError if two have
    one name."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, tuple[nn.Module, str]] = {}
        """Name -> (module, key); the tensors are not kept, because modules replace their
        buffers."""
        self.modules: dict[str, nn.Module] = {}
        """Name -> module with state that is not in its tensors."""
        seen: set[int] = set()
        for prefix, module in _modules(model):
            if module_state.has_state(module):
                self.modules[prefix + module_state.NAME] = module
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self._expect_free(prefix + key)
                    self.parameters[prefix + key] = parameter
            for key in module._buffers:
                if key not in module._non_persistent_buffers_set:
                    self._expect_free(prefix + key)
                    self.buffers[prefix + key] = (module, key)

    def _expect_free(self, name: str) -> None:
        if name in self.parameters or name in self.buffers:
            raise UserError(
                f"model: got two tensors named {name}, without the parts that wrappers add "
                f"({', '.join(sorted(_MARKS))}, and `{_DDP_CHILD}` of DDP); expected one; rename "
                "the child module of that name"
            )


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with the prefix of the names of its parameters and buffers."""
    modules: dict[str, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules():
        prefix = ""
        if path:
            parent_path, _, child = path.rpartition(".")
            prefix, parent = modules[parent_path]
            if not _is_added(parent, child):
                prefix += f"{child}."
        modules[path] = prefix, module
        yield prefix, module


def _is_added(parent: nn.Module, child: str) -> bool:
    if child == _DDP_CHILD:
        return isinstance(parent, DistributedDataParallel | DataParallel)
    return child in _MARKS
