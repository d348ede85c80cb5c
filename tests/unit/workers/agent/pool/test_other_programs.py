"""Programs in the place of a worker: what the agent is sent, which interpreter is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.linux import processes
from holdfast.workers.agent.pool import (
    accelerate_launch,
    entrypoint,
    interpreters,
    other_pulse,
    other_python,
)
from holdfast.workers.agent.pool.entrypoint import Descriptors
from tests.documents import job_document
from tests.unit.workers.members import assigned


def job(**entry: Any) -> TrainingJob:
    return job_from_mapping(job_document("demo", {"entrypoint": entry}))


Ended = tuple[int, str, worker_protocol.Failed | None]


def run(tmp_path: Path, text: str, **order: Any) -> Ended:
    """(exit code, stderr, the failure that the agent receives) of a script in a new interpreter."""
    (tmp_path / "train.py").write_text(text)
    ours, theirs = worker_transport.pair()
    asked, asks = worker_transport.pair()
    with ours, theirs, asked, asks, (tmp_path / "stack").open("wb") as stack:
        wanted = {"script": str(tmp_path / "train.py"), "module": None, "argv": ["train.py", "a"],
                  "accelerate": None, "wire": theirs.fileno(), "stack": stack.fileno(),
                  "asked": asks.fileno(), "signal": processes.STACK_SIGNAL,
                  "bytes": limits.MAX_TRACEBACK_BYTES, **order}  # fmt: skip
        done = subprocess.run(
            [sys.executable, other_python.__file__, json.dumps(wanted)],
            pass_fds=(theirs.fileno(), stack.fileno(), asks.fileno()), cwd=tmp_path,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        theirs.close()
        message = worker_transport.receive(ours)[0]
        while isinstance(message, (worker_protocol.Pulse, worker_protocol.Leaving)):
            message = worker_transport.receive(ours)[0]
    assert message is None or isinstance(message, worker_protocol.Failed)
    return done.returncode, done.stderr, message


def test_a_failure_in_another_interpreter_reaches_the_agent_with_its_type(tmp_path: Path) -> None:
    code, stderr, failed = run(tmp_path, "def f():\n    raise KeyError('no \\udcff')\nf()\n")
    assert code == 1 and failed is not None
    assert failed.error_type == "KeyError" and not failed.secondary
    first = 'Traceback (most recent call last):\n  File "' + str(tmp_path / "train.py")
    assert failed.traceback.startswith(first) and stderr.startswith(first)


def test_a_lost_peer_is_secondary_there_too(tmp_path: Path) -> None:
    text = "raise RuntimeError('[gloo/pair.cc] Connection closed by peer')"
    failed = run(tmp_path, text)[2]
    assert failed is not None and failed.secondary


def test_an_exit_code_is_kept(tmp_path: Path) -> None:
    assert run(tmp_path, "import sys; sys.exit(7)") == (7, "", None)
    code, _stderr, failed = run(tmp_path, "def f(:")
    assert code == 1 and failed is not None and failed.error_type == "SyntaxError"


def test_a_text_in_place_of_an_exit_code_reaches_the_agent(tmp_path: Path) -> None:
    code, stderr, failed = run(tmp_path, "import sys; sys.exit('no data set')")
    assert (code, stderr) == (1, "no data set\n") and failed is not None
    assert (failed.error_type, failed.message) == ("SystemExit", "no data set")


def test_the_signal_for_stacks_writes_the_main_thread_only(tmp_path: Path) -> None:
    text = "import os, threading as t; t.Thread(target=t.Event().wait, daemon=True).start(); "
    text += f"os.kill(os.getpid(), {processes.STACK_SIGNAL})"
    assert run(tmp_path, text) == (0, "", None)
    assert (tmp_path / "stack").read_text().count("most recent call first") == 1


def test_hook_and_exit_functions_run_after_an_error_there_too(tmp_path: Path) -> None:
    text = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('flushed', file=sys.stderr))\n"
        "sys.excepthook = lambda kind, error, trace: print('hook', error, file=sys.stderr)\n"
        "raise ValueError('bad batch')\n"
    )
    code, stderr, failed = run(tmp_path, text)
    assert code == 1 and failed is not None and failed.message == "bad batch"
    assert stderr.splitlines()[-2:] == ["hook bad batch", "flushed"]


def test_a_module_and_its_neighbours_are_found(tmp_path: Path) -> None:
    # A file with the name of one of Holdfast's modules must not be taken for it.
    (tmp_path / "failures.py").write_text("mine = 1")
    text = "import failures, sys; assert failures.mine and sys.argv[1:] == ['a']"
    assert run(tmp_path, text) == (0, "", None)
    assert run(tmp_path, text, script="", module="train") == (0, "", None)


def test_a_script_of_another_python_has_a_pulse_until_the_session_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert other_pulse.INHERITED == worker_transport.INHERITED
    monkeypatch.setenv(other_pulse.INHERITED, "1 2 3")
    ours, theirs = worker_transport.pair()
    asked, asks = worker_transport.pair()
    with ours, theirs, asked, asks:
        other_pulse.start(theirs.fileno(), asks.fileno(), other_python._load)
        kinds, text = [type(worker_transport.receive(ours)[0])], ""
        asked.send(b"?")
        while worker_protocol.CollectivesReport not in kinds:
            message = worker_transport.receive(ours)[0]
            kinds.append(type(message))
            if isinstance(message, worker_protocol.StackReport):
                text = message.text
        assert kinds[0] is worker_protocol.Pulse
        assert "test_other_programs.py" in text
        monkeypatch.delenv(other_pulse.INHERITED)  # the session has attached itself
        (pulse,) = [one for one in threading.enumerate() if one.name == "holdfast-pulse"]
        pulse.join(5)
        assert not pulse.is_alive()


def test_a_failure_is_packed_as_the_agent_reads_it() -> None:
    fields = {"type": "failed", "error_type": "E", "message": "é" * 300, "traceback": "",
              "secondary": True, "out_of_memory": False}  # fmt: skip
    ours, theirs = worker_transport.pair()
    with ours, theirs:
        theirs.send(other_python.packed(fields))
        message = worker_transport.receive(ours)[0]
    assert message == worker_protocol.Failed(
        error_type="E", message="é" * 300, traceback="", secondary=True
    )


# -- interpreters -------------------------------------------------------------------------------
def test_the_python_of_an_environment_is_found(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    for written in ("venv", "venv/bin/python", str(venv)):
        found = interpreters.named(written, tmp_path)
        assert found.path == str(venv / "bin" / "python") and not found.is_ours
        assert found.environment["VIRTUAL_ENV"] == str(venv)
        assert found.environment["PATH"].startswith(f"{venv}/bin{os.pathsep}")


def test_our_own_python_is_recognised(tmp_path: Path) -> None:
    assert interpreters.named(sys.executable, tmp_path).is_ours
    assert interpreters.named(sys.prefix, tmp_path).is_ours


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("no-such-python", "no program of this name is in PATH"),
        ("./venv", "does not exist on this node"),
        (".", "bin/python does not exist on this node"),
    ],
)
def test_a_node_without_the_python_says_so(tmp_path: Path, written: str, why: str) -> None:
    with pytest.raises(UserError, match=r"spec\.entrypoint\.python: got ") as refused:
        interpreters.named(written, tmp_path)
    assert why in str(refused.value)


def tool(directory: Path, text: str) -> str:
    path = directory / "uv"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_python_of_a_runner_comes_with_its_variables(tmp_path: Path) -> None:
    inner = f'export FROM_ENV=1; shift 1; shift; exec {sys.executable} "$@"'
    found = interpreters.of_runner((tool(tmp_path, f"echo noise; {inner}"), "run"))
    assert found.is_ours and found.environment.get("FROM_ENV") == "1"
    with pytest.raises(UserError, match=r"ended with exit code 2 \(no project\)"):
        interpreters.of_runner((tool(tmp_path, "echo no project >&2; exit 2"), "run"))
    with pytest.raises(UserError, match="No such file or directory on this node"):
        interpreters.of_runner((str(tmp_path / "none"), "run"))


# -- what a worker does -------------------------------------------------------------------------
NOWHERE = Descriptors(-1, -1, -1)


@pytest.mark.parametrize(
    ("entry", "more"),
    [
        ({"script": "t.py", "args": ["a"]}, ("a", "--resume", "/o/c-5")),
        ({"command": "torchrun t.py a"}, ("a", "--resume", "/o/c-5")),
    ],
)
def test_arguments_to_resume_are_added_when_there_is_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], more: tuple[str, ...]
) -> None:
    given = job(**entry, resumeArgs=["--resume", "{checkpoint}"])
    assert entrypoint.prepare(given, NOWHERE).args == ("a",)
    monkeypatch.setenv("HOLDFAST_RESUME_FROM_CHECKPOINT", "/o/c-5")
    assert entrypoint.prepare(given, NOWHERE).args == more


def test_a_script_of_our_python_runs_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    found = entrypoint.prepare(job(command="deepspeed train.py --x"), NOWHERE)
    assert (found.script, found.args) == ("train.py", ("--local_rank=3", "--x"))
    found = entrypoint.prepare(job(script="train.py", python=sys.executable), NOWHERE)
    assert found.script == "train.py"


def fake_accelerate(monkeypatch: pytest.MonkeyPatch, launch_command: Any) -> None:
    """accelerate.commands.launch, as far as it is used."""
    launch = types.ModuleType("accelerate.commands.launch")

    def parser() -> Any:
        return types.SimpleNamespace(parse_args=lambda words: types.SimpleNamespace(words=words))

    vars(launch).update(
        launch_command_parser=parser,
        launch_command=lambda arguments: launch_command(launch, arguments),
        simple_launcher=None, tpu_launcher=None, tpu_pod_launcher=None, sagemaker_launcher=None,
        prepare_simple_launcher_cmd_env=lambda arguments: (
            [], {**os.environ, "ACCELERATE_USE_CPU": "1", "WORLD_SIZE": "1"}
        ),
    )  # fmt: skip
    commands = types.ModuleType("accelerate.commands")
    vars(commands)["launch"] = launch
    for name, module in {"accelerate": types.ModuleType("accelerate"),
                         "accelerate.commands": commands,
                         "accelerate.commands.launch": launch}.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)


def test_accelerate_turns_its_options_into_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.run as torchrun

    before = torchrun.run

    def start_torchrun(_launch: Any, arguments: Any) -> None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        monkeypatch.setenv("OMP_NUM_THREADS", "77")
        assert arguments.words[:2] == ["--mixed-precision", "bf16"]
        torchrun.run(arguments)

    fake_accelerate(monkeypatch, start_torchrun)
    words = ["--mixed-precision", "bf16"]
    assert accelerate_launch.variables(words) == {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert torchrun.run is before
    fake_accelerate(monkeypatch, lambda launch, arguments: launch.simple_launcher(arguments))
    assert accelerate_launch.variables([]) == {"ACCELERATE_USE_CPU": "1"}
    fake_accelerate(monkeypatch, lambda launch, arguments: launch.tpu_launcher(arguments))
    with pytest.raises(UserError, match="a configuration of accelerate for TPUs"):
        entrypoint.prepare(job(command="accelerate launch train.py"), NOWHERE)


def test_wrong_options_of_accelerate_are_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_launch: Any, _arguments: Any) -> None:
        raise ValueError("You can only use one of `--cpu`, `--multi_gpu`")

    fake_accelerate(monkeypatch, refuse)
    with pytest.raises(UserError, match="got You can only use one of"):
        entrypoint.prepare(job(command="accelerate launch --cpu train.py"), NOWHERE)


# -- the session in another program -------------------------------------------------------------
def test_a_program_in_the_place_of_a_worker_inherits_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link, agent = worker_transport.pair()
    asked, asks = worker_transport.pair()
    with agent, asks:
        attached = worker_transport.Attached(link, assigned(), job(script="train.py"))
        monkeypatch.setattr(worker_transport, "attached", attached, raising=False)
        monkeypatch.setenv(worker_transport.INHERITED, "")
        worker_transport.hand_over(asked.fileno())
        monkeypatch.delattr(worker_transport, "attached")  # as in a new interpreter
        fds = link.detach(), asked.detach()
        found = worker_transport.attached
        assert found is not None and found.assign == assigned() and found.job.name == "demo"
        assert found.link.fileno() == fds[0] and not os.get_inheritable(fds[0])
        assert worker_transport.INHERITED not in os.environ  # child processes are not the worker
        found.link.close()
        assert found.inspection is not None
        found.inspection.close()


def test_closed_descriptors_are_an_error_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(worker_transport, "attached", raising=False)
    monkeypatch.setenv(worker_transport.INHERITED, "990 991 992")
    with pytest.raises(HoldfastError, match="the connection to the agent was not inherited"):
        worker_transport.attached  # noqa: B018
    monkeypatch.delattr(worker_transport, "attached", raising=False)
    assert worker_transport.attached is None
