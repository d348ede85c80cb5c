"""Meaning of a training script's exception: a cause, or the consequence of a lost peer.

Only the standard library is imported: other_python.py loads this file in the interpreter of a user.
"""

from __future__ import annotations

import re

_PEER_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited"
    r"|remote peer|Socket closed|Connection was likely closed|Timed out waiting|recvValue failed"
    r"|failed to recv|NCCL communicator was aborted|ncclRemoteError|ncclSystemError"
    r"|Connection refused|Connection timed out|wait timeout|unexpected EOF",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|std::bad_alloc")
_TORCH_DISTRIBUTED = re.compile(r"gloo|nccl|c10d|TCPStore|ProcessGroup|Watchdog", re.IGNORECASE)
_NETWORK_ERRORS = {"DistNetworkError", "DistBackendError", "DistStoreError", "DistQueueEmptyError"}


def is_secondary(error: BaseException) -> bool:
    """True if the error reports the loss of a peer or of the network: not the root cause."""
    seen: BaseException | None = error
    while seen is not None:
        kind, message = type(seen).__name__, text_of(seen)
        if kind in _NETWORK_ERRORS:
            # DistBackendError is also raised for wrong use; its text then names no peer.
            if kind != "DistBackendError" or _PEER_GONE.search(message):
                return True
        elif isinstance(seen, RuntimeError) and _PEER_GONE.search(message):
            return bool(_TORCH_DISTRIBUTED.search(message))
        seen = seen.__cause__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Host or device memory ran out: the same step may fit on another machine or mesh."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"MemoryError", "OutOfMemoryError"}:
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(text_of(error)))


def encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def text_of(error: BaseException) -> str:
    """The text of an exception whose `__str__` may fail."""
    try:
        return str(error)
    except BaseException as second:
        return f"<no text: __str__ raised {type(second).__name__}>"
