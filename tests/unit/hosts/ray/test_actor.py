"""The record of a job in the cluster's store."""

from __future__ import annotations

import msgspec

from holdfast.orchestrator.hosts.ray.actor import ControllerOrder


def test_a_record_of_an_earlier_release_without_a_runtime_env_is_read() -> None:
    order = ControllerOrder(
        document={}, job="demo", job_id="00", spec_directory="/", token="", certificate=b"", key=b""
    )
    older = msgspec.structs.asdict(order)
    del older["runtime_env"]
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=ControllerOrder)
    assert found == order and found.runtime_env == {}
