"""The environment of a worker: torchrun contract, fabric, threads, recovery."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping, job_to_mapping
from holdfast.orchestrator.protocol.environment import (
    INCIDENTS,
    chosen_cache,
    explain_environment,
)
from holdfast.orchestrator.protocol.facts import (
    Gpu,
    LaunchIncident,
    Membership,
    NodeFacts,
    WorkerSeat,
)
from holdfast.orchestrator.protocol.mesh import Mesh
from tests.documents import job_document


def make_job(**spec: Any) -> TrainingJob:
    return job_from_mapping(
        job_document(
            "demo",
            {
                "entrypoint": {"script": "train.py"},
                "nodes": {"min": 1, "max": 2},
                "workersPerNode": 2,
                **spec,
            },
        )
    )


def make_facts(**facts: Any) -> NodeFacts:
    given = {"hostname": "a", "address": "10.0.0.1", "data_port": 1, "slots": 2, "cpus": 8}
    return NodeFacts(**{**given, **facts})


MEMBERSHIP = Membership(
    generation=3,
    mesh=Mesh(replicate=2, shard=2),
    num_nodes=2,
    workers_per_node=2,
    master_address="10.0.0.1",
    master_port=29500,
    restart_count=2,
)
SEAT = WorkerSeat(rank=3, local_rank=1, shard=1, persists=False)


def worker_environment(*arguments: Any, **more: Any) -> dict[str, str]:
    return {one.name: one.value for one in explain_environment(*arguments, **more)}


def environment(job: TrainingJob, facts: NodeFacts | None = None) -> dict[str, str]:
    return worker_environment(job, MEMBERSHIP, SEAT, 1, facts or make_facts())


def test_a_worker_gets_the_whole_torchrun_contract() -> None:
    got = environment(make_job())
    expected = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_RUN_ID": "demo",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    assert {name: got[name] for name in expected} == expected
    assert int(got["TORCHELASTIC_MAX_RESTARTS"]) > 0


@pytest.mark.parametrize(
    ("facts", "env", "visible"),
    [
        (make_facts(), {}, "2,3"),
        (make_facts(visible_devices=("4", "5", "6", "GPU-7")), {}, "6,GPU-7"),
        (make_facts(), {"CUDA_VISIBLE_DEVICES": "0, 2,4,6"}, "4,6"),
    ],
)
def test_a_worker_with_several_gpus_sees_its_own_only(
    facts: NodeFacts, env: dict[str, str], visible: str
) -> None:
    job = make_job(resources={"gpu": 2}, entrypoint={"script": "train.py"}, env=env)
    seat = WorkerSeat(rank=3, local_rank=1, shard=1, persists=True)
    assert worker_environment(job, MEMBERSHIP, seat, 1, facts)["CUDA_VISIBLE_DEVICES"] == visible


def test_a_cpu_job_gets_no_nccl_settings() -> None:
    assert not [name for name in environment(make_job()) if "NCCL" in name]


def test_sockets_use_the_interface_that_carries_the_address() -> None:
    facts = make_facts(address_interface="ens5")
    got = environment(make_job(resources={"gpu": 1}), facts)
    assert got["GLOO_SOCKET_IFNAME"] == "ens5"
    assert got["NCCL_SOCKET_IFNAME"] == "=ens5"
    job = make_job(resources={"gpu": 1}, fabric={"interfaces": ["ens7", "ens8"]})
    assert environment(job, facts)["NCCL_SOCKET_IFNAME"] == "=ens7,ens8"


def test_nodes_of_one_machine_use_loopback() -> None:
    got = environment(make_job(), make_facts(address="127.0.0.1"))
    assert got["GLOO_SOCKET_IFNAME"] == "lo"


def test_an_unknown_interface_is_not_guessed() -> None:
    got = environment(make_job(resources={"gpu": 1}))
    assert "GLOO_SOCKET_IFNAME" not in got
    assert "NCCL_SOCKET_IFNAME" not in got


@pytest.mark.parametrize(
    ("hcas", "expected"),
    [
        pytest.param(("mlx5_0:InfiniBand", "mlx5_1:InfiniBand"), {"NCCL_IB_DISABLE": "0"}, id="ib"),
        pytest.param(
            ("mlx5_0:InfiniBand", "mlx5_1:Ethernet"), {"NCCL_IB_HCA": "=mlx5_0"}, id="mixed"
        ),
        pytest.param(("mlx5_0:Ethernet",), {"NCCL_IB_DISABLE": "0"}, id="roce"),
        pytest.param(("rdmap0s6:Unspecified",), {"FI_PROVIDER": "efa"}, id="efa"),
        pytest.param((), {"NCCL_IB_DISABLE": "1"}, id="tcp"),
    ],
)
def test_auto_chooses_the_fabric_by_the_devices_of_the_node(
    hcas: tuple[str, ...], expected: dict[str, str]
) -> None:
    got = environment(make_job(resources={"gpu": 1}), make_facts(hcas=hcas))
    assert expected.items() <= got.items()
    assert "NCCL_NET" not in got, "auto must let NCCL fall back"


@pytest.mark.parametrize(
    ("profile", "network"), [("ib", "IB"), ("roce", "IB"), ("efa", "AWS Libfabric")]
)
def test_a_named_profile_fails_rather_than_falls_back(profile: str, network: str) -> None:
    got = environment(make_job(resources={"gpu": 1}, fabric={"profile": profile}))
    assert got["NCCL_NET"] == network


def test_a_single_node_with_several_gpus_stays_on_nvlink() -> None:
    facts = make_facts(gpus=(Gpu("H200", 1), Gpu("H200", 1)))
    one = Membership(
        generation=1,
        mesh=Mesh(shard=2),
        num_nodes=1,
        workers_per_node=2,
        master_address="10.0.0.1",
        master_port=1,
        restart_count=0,
    )
    settings = explain_environment(make_job(resources={"gpu": 1}), one, SEAT, 0, facts)
    chosen = {s.name: s for s in settings}["NCCL_IB_DISABLE"]
    assert chosen.value == "1"
    assert "one node, several GPUs" in chosen.why


def test_a_variable_of_the_user_wins_and_names_the_value_it_replaces() -> None:
    job = make_job(resources={"gpu": 1}, env={"NCCL_IB_DISABLE": "0", "MY_FLAG": "x"})
    settings = {s.name: s for s in explain_environment(job, MEMBERSHIP, SEAT, 1, make_facts())}
    assert settings["NCCL_IB_DISABLE"].value == "0"
    assert settings["NCCL_IB_DISABLE"].source == "user"
    assert "NCCL_IB_DISABLE=1" in settings["NCCL_IB_DISABLE"].why
    assert settings["MY_FLAG"].value == "x"


def test_an_old_name_set_by_the_user_overrides_the_new_one() -> None:
    job = make_job(resources={"gpu": 1}, env={"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"})
    got = environment(job)
    assert got["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "0"
    assert "TORCH_FR_BUFFER_SIZE" not in got


def test_the_torch_heartbeat_timeout_is_longer_than_holdfasts_timeouts() -> None:
    job = make_job(resources={"gpu": 1}, recovery={"startupTimeoutSeconds": 1800})
    assert int(environment(job)["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > 1800


def test_flight_recorder_dumps_are_written_beside_the_logs() -> None:
    got = worker_environment(
        make_job(resources={"gpu": 1}), MEMBERSHIP, SEAT, 1, make_facts(), log_directory="/logs/"
    )
    assert got["TORCH_FR_DUMP_TEMP_FILE"] == "/logs/flight-recorder-rank-"


def test_threads_follow_the_cpu_request_or_share_the_cores() -> None:
    assert environment(make_job(resources={"cpu": "3500m"}))["OMP_NUM_THREADS"] == "3"
    assert environment(make_job())["OMP_NUM_THREADS"] == "4"
    one_machine = make_facts(address="127.0.0.1")
    assert environment(make_job(), one_machine)["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in environment(make_job(), make_facts(cpus=0))


def test_every_setting_has_a_reason() -> None:
    job = make_job(resources={"gpu": 1}, env={"X": "1"})
    settings = explain_environment(job, MEMBERSHIP, SEAT, 1, make_facts(address="127.0.0.1"))
    assert all(setting.why for setting in settings)
    assert len({setting.name for setting in settings}) == len(settings)


def test_compile_caches_are_per_machine_and_not_per_generation() -> None:
    facts = make_facts(cache_directory="/home/u/.holdfast/cache/")
    on_cpu, on_gpu = (
        environment(make_job(resources={"gpu": 0}), facts),
        environment(make_job(resources={"gpu": 1}), facts),
    )
    assert on_cpu["TORCHINDUCTOR_CACHE_DIR"] == "/home/u/.holdfast/cache/inductor"
    assert "TRITON_CACHE_DIR" not in on_cpu
    assert on_gpu["TRITON_CACHE_DIR"] == "/home/u/.holdfast/cache/triton"
    mine = environment(make_job(env={"TORCHINDUCTOR_CACHE_DIR": "/mine"}), facts)
    assert mine["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    assert "TORCHINDUCTOR_CACHE_DIR" not in environment(make_job())


def test_a_cache_that_the_user_has_set_in_the_agents_environment_is_left() -> None:
    assert chosen_cache({"HOLDFAST_CACHE_DIR": "/c"}) == "/c"
    assert chosen_cache({"HOLDFAST_CACHE_DIR": "/c", "TRITON_CACHE_DIR": "/t"}) == ""
    assert chosen_cache({}) == ""


@pytest.mark.parametrize("named", ["facts", "env"])
def test_each_worker_sees_its_own_part_of_a_gpu(named: str) -> None:
    """CUDA shows one MIG device to a process, the first that is named."""
    facts, env = make_facts(), {}
    if named == "facts":
        facts = make_facts(visible_devices=("MIG-a", "MIG-b"))
    else:
        env = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    got = environment(make_job(resources={"gpu": 1}, env=env), facts)
    assert got["CUDA_VISIBLE_DEVICES"] == "MIG-b"
    whole = environment(make_job(resources={"gpu": 1}), make_facts(visible_devices=("0", "1")))
    assert "CUDA_VISIBLE_DEVICES" not in whole


def test_a_tracker_continues_one_run_over_restarts() -> None:
    job = make_job(entrypoint={"script": "train.py"})
    first = msgspec.structs.replace(SEAT, rank=0)
    got = worker_environment(job, MEMBERSHIP, first, 0, make_facts(), job_id="6f52e481")
    assert (got["WANDB_RUN_ID"], got["WANDB_RESUME"]) == ("6f52e481", "allow")
    own = make_job(entrypoint={"script": "train.py"}, env={"WANDB_RUN_ID": "mine"})
    env = worker_environment(own, MEMBERSHIP, first, 0, make_facts(), job_id="6f52e481")
    assert (env["WANDB_RUN_ID"], env["HOLDFAST_JOB_ID"]) == ("mine", "6f52e481")
    other = worker_environment(job, MEMBERSHIP, SEAT, 1, make_facts(), job_id="6f52e481")
    assert SEAT.rank > 0 and "WANDB_RUN_ID" not in other
    assert other["HOLDFAST_JOB_ID"] == "6f52e481"


def test_all_ranks_of_a_script_know_which_incident_led_to_their_start() -> None:
    job = make_job(entrypoint={"script": "train.py"})
    known = LaunchIncident(
        number=3, at_ns=5, failure_class="hang", title="rank 2 hangs", last_step=41,
        world_size_before=4, world_size_after=4,
    )  # fmt: skip
    assert INCIDENTS not in worker_environment(job, MEMBERSHIP, SEAT, 1, make_facts())
    again = msgspec.structs.replace(MEMBERSHIP, incidents=(known,))
    text = worker_environment(job, again, SEAT, 1, make_facts())[INCIDENTS]
    assert msgspec.json.decode(text, type=tuple[LaunchIncident, ...]) == (known,)
    assert json.loads(text)[0]["title"] == "rank 2 hangs"
    document = job_to_mapping(make_job())
    document["spec"]["entrypoint"] = {"recipe": {"name": "pretrain"}}
    recipe = job_from_mapping(document)
    assert INCIDENTS not in worker_environment(recipe, again, SEAT, 1, make_facts())
