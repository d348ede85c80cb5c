"""The Python client on this machine: a spec, a function, what is refused, and a notebook."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast import Client
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.runtime.job_directory import Home

from .local_rig import BOUND_S, ENDLESS, short, spec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
FACTOR = 2.0


def train(steps: int) -> None:
    from holdfast import session

    for step in range(steps):
        print("step", step, step * FACTOR, flush=True)
        session.report(step, loss=FACTOR, total_steps=steps)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose jobs have ended at the end of the test."""
    path = short(tmp_path / "home")
    yield path
    client = Client(home=path)
    for view in client.jobs():
        job = client.job(view.name)
        if view.state not in ("succeeded", "failed", "cancelled"):
            job.cancel()
        job.wait(BOUND_S)


def test_a_spec_runs_is_resized_suspended_and_reported(home: Path, tmp_path: Path) -> None:
    client = Client(home=home)
    job = client.submit(spec("by-client", ENDLESS))
    with pytest.raises(TimeoutError, match="job by-client: has not ended after 0"):
        job.wait(timeout_s=0)
    with pytest.raises(UserError, match=r"metadata\.name: got by-client, which exists"):
        client.submit(spec("by-client", 1))
    assert "to 1 node" in job.resize(1)
    lines = job.logs(follow=True)
    assert next(iter(lines)) and job.cancel()
    view = job.wait(BOUND_S)
    assert view.state == "cancelled" and list(lines)
    assert [one.name for one in client.jobs()] == ["by-client"]
    assert any("resize" in str(event) for event in job.events())
    assert job.view().job_id == view.job_id
    job.delete(keep_checkpoints=tmp_path / "kept")
    assert client.jobs() == [] and (tmp_path / "kept").is_dir()


def test_a_function_becomes_a_script_of_the_home_and_goes_with_its_job(home: Path) -> None:
    job = Client(home=home).submit(train, args=(4,), workers=2, gpus=0)
    view = job.wait(BOUND_S)
    assert (view.name, view.state, view.step, view.loss) == ("train", "succeeded", 3, FACTOR)
    assert job.logs(1) == ["step 0 0.0", "step 1 2.0", "step 2 4.0", "step 3 6.0"]
    assert [path.name for path in home.glob("client/train/*/job/*.py")] == ["run_train.py"]
    job.delete()
    assert not (home / "client" / "train").exists()


def test_what_this_machine_refuses_leaves_nothing_behind(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"spec\.nodes\.max: got 900"):
        Client(home=home).submit(train, args=(1,), nodes=900, gpus=0)
    with pytest.raises(UserError, match=r"missing\.py"):
        Client(home=home).submit("missing.py", gpus=0)
    assert not list((home / "client").iterdir())
    assert not list(tmp_path.glob(".holdfast*"))


CELLS = [
    """
    from holdfast import Client
    client = Client(home=HOME)
    class Doubler:
        def of(self, number):
            return 2 * number
    def work(steps):
        import time
        from holdfast import session
        for step in range(steps):
            print("doubled", Doubler().of(step), flush=True)
            session.report(step, total_steps=steps)
            time.sleep(0.1)
    job = client.submit(work, args=(1_000_000,), gpus=0)
    """,
    "lines = job.logs(follow=True); print(next(lines)[-9:])",
    "job",
]


def test_a_notebook_submits_a_function_and_its_job_outlives_the_kernel(home: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    cells = [textwrap.dedent(cell).replace("HOME", repr(str(home))) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=BOUND_S).execute()  # and the kernel ends
    assert notebook.cells[1].outputs[0]["text"] == "doubled 0\n"
    assert "<td>work</td>" in notebook.cells[2].outputs[0]["data"]["text/html"]
    job = Client(home=home).job("work")
    assert job.view().controller_alive
    job.cancel()
    assert job.wait(BOUND_S).state == "cancelled"


def test_a_job_goes_on_when_the_program_that_started_it_is_interrupted(home: Path) -> None:
    program = """
    import sys
    from holdfast import Client
    job = Client(home=sys.argv[1]).submit("endless.py", gpus=0)
    print("started", flush=True)
    job.wait()
    """
    (home / "endless.py").write_text("import time\nwhile True: time.sleep(1)\n")
    started = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(home)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=home, start_new_session=True,
    )  # fmt: skip
    assert started.stdout is not None
    assert started.stdout.readline() == b"started\n"
    psutil.Process(started.pid).send_signal(signal.SIGINT)  # as a notebook interrupts a cell
    started.wait(BOUND_S)
    started.stdout.close()
    directory = Home(home).directory("endless")
    give_up = time.monotonic() + BOUND_S
    while not directory.controller_alive() and time.monotonic() < give_up:
        time.sleep(0.1)
    assert Client(home=home).job("endless").view().controller_alive
