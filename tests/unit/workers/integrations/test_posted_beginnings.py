"""What is added to the first post of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from holdfast.workers.integrations.resumed_trainers import post_where_it_begins


def _callback_class() -> Any:
    """As KubeflowCallback of transformers 5.23 posts."""

    class Callback:
        posts: list[dict[str, Any]]

        def __init__(self) -> None:
            self.posts = []

        def _update_status(
            self, progress_percent: int | None = None, metrics: Any = None, force: bool = False
        ) -> None:
            self.posts.append({"percent": progress_percent, "metrics": metrics, "force": force})

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> str:
            metrics = {"total_steps": state.max_steps} if state.max_steps else None
            self._update_status(progress_percent=0, metrics=metrics, force=True)
            return "begun"

    return Callback


def test_the_post_of_a_beginning_has_the_steps_before_and_no_other_post_has() -> None:
    kind = _callback_class()
    post_where_it_begins(kind)
    post_where_it_begins(kind)
    callback = kind()
    state = SimpleNamespace(global_step=70, max_steps=400)
    assert callback.on_train_begin(None, state, None) == "begun"
    callback._update_status(metrics={"current_step": 71})
    assert callback.posts == [
        {"percent": 0, "metrics": {"total_steps": 400, "began_after_steps": 70}, "force": True},
        {"percent": None, "metrics": {"current_step": 71}, "force": False},
    ]
    state = SimpleNamespace(global_step=0, max_steps=0)
    callback.on_train_begin(None, state, None)
    assert callback.posts[-1]["metrics"] == {"began_after_steps": 0}


def test_a_class_that_posts_in_another_way_is_left_alone() -> None:
    kind = _callback_class()
    del kind._update_status
    before = kind.on_train_begin
    post_where_it_begins(kind)
    assert kind.on_train_begin is before
