"""A push uses a share of the network only."""

from __future__ import annotations

import pytest

from holdfast.workers.agent.storage.peer_transfer import NetworkShare


class Network:
    """Virtual time: each part takes a second to send."""

    def __init__(self) -> None:
        self.now_s = self.paused_s = 0.0

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        self.paused_s += seconds

    def push(self, share: float, parts: int) -> NetworkShare:
        network = NetworkShare(share, clock=lambda: self.now_s, pause=self.pause)
        for part in range(parts):
            self.now_s += 1.0
            network.sent(last=part == parts - 1)
        return network


@pytest.mark.parametrize(("share", "paused_s"), [(1.0, 0.0), (0.5, 9.0), (0.25, 27.0), (0.1, 81.0)])
def test_the_pauses_leave_the_rest_of_the_network(share: float, paused_s: float) -> None:
    network = Network()
    network.push(share, 10)
    assert network.paused_s == pytest.approx(paused_s)


def test_a_state_of_one_part_is_pushed_without_a_pause() -> None:
    network = Network()
    network.push(0.01, 1)
    assert network.paused_s == 0
