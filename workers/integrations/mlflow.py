"""One MLflow run for all generations of a job.

MLflow has no "create or continue": MLFLOW_RUN_ID must name a run that exists. So the first start
creates the run with the job's id as a tag, and each restart finds it by that tag; the tracking
server is the only place that knows it.
"""

from __future__ import annotations

import os

import mlflow
from mlflow.tracking import MlflowClient

from holdfast.orchestrator.protocol.environment import JOB_ID
from holdfast.workers import worker_transport

from . import incidents

TAG = "holdfast.job_id"
_RUN = "MLFLOW_RUN_ID"


def continue_mlflow_run(experiment: str | None = None) -> str | None:
    """Finds the run of this job, or creates it, and puts its id into MLFLOW_RUN_ID, where
    mlflow.start_run and the callback of transformers look. Call it before them.

    `experiment`: its name; by default MLflow's own choice (MLFLOW_EXPERIMENT_NAME, or `Default`).
    A run that goes on gets the tag `holdfast.incident.N`, why the script was started again.
    Returns the id; None outside Holdfast, and on ranks other than 0. An MLFLOW_RUN_ID that is set
    is left as it is. Raises MlflowException if the server does not answer.
    """
    if found := os.environ.get(_RUN):
        return found
    job_id = os.environ.get(JOB_ID)
    if worker_transport.attached is None or not job_id or os.environ.get("RANK") != "0":
        return None
    name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
    given = None if experiment else os.environ.get("MLFLOW_EXPERIMENT_ID")
    where = given or mlflow.set_experiment(name).experiment_id
    client = MlflowClient()
    of_job = f"tags.`{TAG}` = '{job_id}'"
    runs = client.search_runs([where], of_job, order_by=["attributes.start_time ASC"])
    run = runs[0] if runs else client.create_run(where, tags={TAG: job_id})
    os.environ[_RUN] = str(run.info.run_id)
    for one in incidents.launch_incidents():
        incidents.tag(client, run.info.run_id, one, incidents.describe(one))
    return str(run.info.run_id)
