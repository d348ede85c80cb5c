"""State of trainers as text of one size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.orchestrator.errors import UserError
from holdfast.workers.integrations.fixed_size import ROOM_BYTES, TEXT_BYTES, pack, to_json, unpack


def test_each_state_has_the_same_size_and_comes_back() -> None:
    small = {"step": 1, "losses": [0.5, float("inf"), np.float64(0.25)], "best": None}
    large = {"paths": {f"step={n}.ckpt": torch.tensor(0.5 * n) for n in range(50)}}
    texts = [pack(to_json(state)) for state in (small, large)]
    assert [len(text) for text in texts] == [TEXT_BYTES] * 2
    assert unpack(texts[0]) == {"step": 1, "losses": [0.5, float("inf"), 0.25], "best": None}
    back = unpack(texts[1])["paths"]
    assert back == large["paths"] and back["step=3.ckpt"].dtype == torch.float32


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=f"expected at most {ROOM_BYTES}"):
        pack("x" * (ROOM_BYTES + 1))
    with pytest.raises(UserError, match="got Tensor in the state of the trainer"):
        to_json({"weights": torch.zeros(3)})
