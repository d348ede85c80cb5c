"""CPUs to which a worker is bound, from a made-up /sys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.workers.session import numa

PLACE = "0000:17:00.0"


def system(root: Path, node: str, cpus: str = "0-3,8-11") -> Path:
    device = root / "bus/pci/devices" / PLACE
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    place = root / f"devices/system/node/node{node}"
    place.mkdir(parents=True)
    (place / "cpulist").write_text(f"{cpus}\n")
    return root


@pytest.mark.parametrize(
    ("node", "allowed", "bound"),
    [
        ("1", set(range(16)), {0, 1, 2, 3, 8, 9, 10, 11}),
        ("1", {2, 3, 4, 5}, {2, 3}),  # what the cluster allows is narrowed, never widened
        ("1", {4, 5}, set()),  # no CPU of that node is allowed
        ("1", {0, 1}, set()),  # nothing to do
        ("-1", set(range(16)), set()),  # the system does not know
    ],
)
def test_a_worker_is_bound_to_the_cpus_beside_its_gpu(
    tmp_path: Path, node: str, allowed: set[int], bound: set[int]
) -> None:
    applied: list[Iterable[int]] = []
    assert numa.bind(system(tmp_path, node), PLACE, allowed, applied.append) == bound
    assert applied == ([bound] if bound else [])


def test_a_device_that_the_system_does_not_list_binds_nothing(tmp_path: Path) -> None:
    for place in ("", "0000:99:00.0"):
        assert numa.bind(tmp_path, place, {0, 1}, lambda cpus: pytest.fail("bound")) == set()


def test_a_refused_binding_is_printed_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(cpus: Iterable[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    assert numa.bind(system(tmp_path, "0"), PLACE, set(range(16)), refuse) == set()
    assert "no NUMA binding: Operation not permitted" in capsys.readouterr().err


def test_the_pci_name_comes_from_torchs_properties_if_it_has_them() -> None:
    known = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    assert numa.pci_place(known) == PLACE
    assert numa.pci_place(SimpleNamespace(name="H100")) == ""
