"""transformers posts its progress every few seconds, and when it begins to train, but not where.
Added to that post is how many steps its checkpoint has: so it is known how many a launch trains.

Nothing of a framework is imported here.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from holdfast.orchestrator.protocol.environment import BEGAN_AFTER_STEPS


def post_where_it_begins(callback_class: Any) -> None:
    """Has this class, KubeflowCallback of transformers 5, post with the beginning of a training
    after how many steps that is."""
    inner = callback_class.on_train_begin
    if getattr(inner, "posts_where_it_begins", False) or not hasattr(
        callback_class, "_update_status"
    ):
        return

    @wraps(inner)
    def on_train_begin(self: Any, args: Any, state: Any, *rest: Any, **more: Any) -> Any:
        post = self._update_status

        def with_its_step(*given: Any, **named: Any) -> Any:
            if "metrics" in named:
                known = {BEGAN_AFTER_STEPS: state.global_step}
                named["metrics"] = {**(named["metrics"] or {}), **known}
            return post(*given, **named)

        self._update_status = with_its_step
        try:
            return inner(self, args, state, *rest, **more)
        finally:
            del self._update_status

    on_train_begin.posts_where_it_begins = True  # type: ignore[attr-defined]
    callback_class.on_train_begin = on_train_begin
