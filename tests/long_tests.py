"""Tests that run with `--all` only (`make test-all`): on two cores most of the time of the
end-to-end tests. Every mechanism and every backend is tested without them; they add rarer cases.

A line is the beginning of test ids.
"""

_LOSSES = "tests/strategies/test_losses.py::test_losses_and_gradient_norms_are_those_of_one_process"
_MESHES = "CP 2; PP 2 x C; PP 2 x D; PP 2 x FSDP 2,; PP 2 x TP 2,; PP 4; TP 2 x D; TP 2 x FSDP 2]"
_STRATEGIES = "elastic faults own_loops recipe three_axes variants"
_RAY = (
    "again autoscaler client commands dashboard drain gang head http journal kills metrics pip "
    "placement placement_groups python_client runtime_env token two_jobs verbs"
)
_KILLED = (
    "tests/frameworks/test_recovery.py::"
    "test_a_killed_worker_costs_the_steps_since_the_scripts_checkpoint"
)
_DELETED = "tests/e2e/kubernetes/nodes/test_deletion.py::test_a_deleted_job_leaves_nothing"
_WARM_UP = "tests/unit/workers/agent/pool/test_warmup.py::test_a_warm_up_leaves"
LONG = (
    "bench/gpu/test_kit.py::test_a_rehearsal",
    # Unit tests of three packages once more; the rest of the file removes every part.
    "tests/tidy/test_removable.py::test_a_launch_is_decided_and_shown_without_the_explorer",
    # Every strategy through kills, resizes and reshards, and its variants; test_losses trains each
    # axis and pairs of them, and tests/e2e/local has the faults with FSDP, HSDP and DDP.
    *(f"{_LOSSES}[{mesh}" for mesh in _MESHES.split("; ")),
    *(f"tests/strategies/test_{name}.py" for name in _STRATEGIES.split()),
    # All copies of a shard on a node, a cache of compiled code, memory limits, a built wheel, files
    # of the user's with our names, the example of the README; test_soak, test_kill, test_hangs and
    # test_hand_over have each kind of fault.
    "tests/e2e/local/test_adopt.py",
    "tests/e2e/local/test_again.py::test_a_job_that_has_ended",
    "tests/e2e/local/test_compile.py",
    "tests/e2e/local/test_damaged_checkpoints.py::test_a_store_that_is_away",
    "tests/e2e/local/test_entrypoints.py::test_uv_adds",
    "tests/e2e/local/test_entrypoints.py::test_a_session_in_another_interpreter",
    "tests/e2e/local/test_first_commands.py::test_the_example_survives",
    "tests/e2e/local/test_first_commands.py::test_the_first_program_of_the_client",
    "tests/e2e/local/test_first_commands.py::test_the_quickstart",
    "tests/e2e/local/test_full_disk.py::test_a_controller_that_ends",
    "tests/e2e/local/test_full_shard.py",
    "tests/e2e/local/test_growth.py",
    "tests/e2e/local/test_hand_over.py::test_a_controller_that_returns_in_time",
    "tests/e2e/local/test_hand_over.py::test_a_drain",
    "tests/e2e/local/test_hand_over.py::test_a_job_without_spares_waits",
    "tests/e2e/local/test_hand_over.py::test_a_requested_checkpoint",
    "tests/e2e/local/test_hangs.py::test_a_rank_that_computes",
    "tests/e2e/local/test_host_memory.py",
    "tests/e2e/local/test_kill.py::test_training_survives_its_node_launcher",
    "tests/e2e/local/test_large_spec.py",
    "tests/e2e/local/test_last_incident.py",
    "tests/e2e/local/test_looking.py",
    "tests/e2e/local/test_name_collision.py",
    "tests/e2e/local/test_outputs.py::test_a_job_that_succeeds_ends_with_0[c",
    "tests/e2e/local/test_outputs.py::test_a_job_that_succeeds_ends_with_0[f",
    "tests/e2e/local/test_outputs.py::test_a_job_that_succeeds_ends_with_0[l",
    "tests/e2e/local/test_outputs.py::test_a_job_that_succeeds_ends_with_0[u",
    "tests/e2e/local/test_save.py::test_save_with_wait_asks",
    "tests/e2e/local/test_save.py::test_save_with_wait_fails",
    "tests/e2e/local/test_silent_scripts.py::test_a_script_that_uses",
    "tests/e2e/local/test_soak.py",
    "tests/e2e/local/test_state_pages.py",
    "tests/e2e/local/test_trackers.py",
    "tests/e2e/local/test_twins.py",
    "tests/e2e/local/test_wheel.py",
    "tests/e2e/workers/test_shards.py",
    # More meshes and entry points than one.
    *(f"{_WARM_UP}_no_group_no_random_state_and_no_threads_behind[entrypoint{n}" for n in "123"),
    "tests/planner_accuracy/test_real_ranks.py::test_a_traced_rank_needs_and_sends_what_a_real_one_does[t",
    "tests/unit/workers/training/test_calibrate.py::test_two_workers",
    # Each rare order of an import and a fork.
    "tests/e2e/agent/test_import_template.py::test_a_module",
    "tests/e2e/agent/test_import_template.py::test_a_signal",
    "tests/e2e/agent/test_import_template.py::test_a_worker",
    "tests/e2e/agent/test_import_template.py::test_workers",
    "tests/e2e/agent/test_import_template.py::test_more",
    "tests/e2e/agent/test_import_template.py::test_without",
    # A job that is deleted in other phases than running and recovering; a second operator at rest.
    *(f"{_DELETED}[{phase}" for phase in ("c", "f", "never", "p", "s")),
    "tests/e2e/kubernetes/nodes/test_installed.py::test_two_operators",
    # A compile cache over pods; tests/unit/backends/kubernetes has its volume.
    "tests/e2e/kubernetes/nodes/test_installed.py::test_a_pod_that_replaces_another_one_compiles",
    # Builds whole images, with 3 GB of torch; the other tests have images of this machine's files.
    "tests/e2e/kubernetes/nodes/test_images.py",
    # Losses of nodes; test_pod_failures has pods that fail or go.
    "tests/e2e/kubernetes/nodes/test_training.py::test_a_drained",
    "tests/e2e/kubernetes/nodes/test_training.py::test_a_spare",
    "tests/e2e/kubernetes/nodes/test_training.py::test_a_suspended",
    "tests/e2e/kubernetes/nodes/test_training.py::test_training_continues_after_a_power_loss",
    "tests/e2e/kubernetes/nodes/test_training.py::test_partitioned_pods_end",
    "tests/e2e/kubernetes/nodes/test_pod_failures.py::test_a_pod_whose_label",
    "tests/e2e/kubernetes/nodes/test_capacity.py",
    "tests/e2e/kubernetes/nodes/test_code_in_pods.py",
    "tests/e2e/kubernetes/nodes/test_examples.py",
    "tests/e2e/kubernetes/nodes/test_commands_training.py",
    "tests/e2e/kubernetes/nodes/test_placement.py",
    # test_commands watches through an outage, and the rights of one namespace are fewer.
    "tests/e2e/kubernetes/test_chart.py::test_the_notes_warn",
    "tests/e2e/kubernetes/test_command_refusals.py::test_kubectl",
    "tests/e2e/kubernetes/test_command_refusals.py::test_watching",
    "tests/e2e/kubernetes/test_rights.py::test_the_whole_life_of_a_job_needs_no_other_rights[n",
    # The test cluster itself; many jobs, several operators and schedulers; a journal of a thousand
    # pods.
    "tests/e2e/kubernetes/nodes/test_rig.py",
    "tests/e2e/kubernetes/test_journal_size.py",
    "tests/e2e/kubernetes/test_native_gangs.py",
    "tests/e2e/kubernetes/test_queued_jobs.py",
    "tests/e2e/kubernetes/test_replicas.py",
    "tests/e2e/kubernetes/test_scale.py",
    "tests/e2e/kubernetes/test_stores.py",
    "tests/e2e/kubernetes/test_two_releases.py",
    # Upgrades by kubectl, and from a commit; the helm case has the chart's schema and stored jobs.
    "tests/e2e/kubernetes/test_upgrade.py::test_an_upgrade_keeps_pod_templates[older-client",
    "tests/e2e/kubernetes/test_upgrade.py::test_an_upgrade_keeps_pod_templates[older-server",
    "tests/e2e/kubernetes/test_upgrade.py::test_an_upgrade_keeps_pod_templates[with",
    "tests/e2e/kubernetes/test_waiting_jobs.py",
    # Clusters of their own (autoscaler, tokens, pip), a browser, several jobs at once. test_faults,
    # test_cleanup, test_jobs_api and the contract run a job on Ray and lose its parts.
    *(f"tests/e2e/ray/test_{name}.py" for name in _RAY.split()),
    "tests/e2e/ray/test_bad_input.py::test_a_script_that_the_nodes_lack",
    "tests/e2e/ray/test_bad_input.py::test_the_name_of_a_job_that_runs",
    "tests/e2e/ray/test_cleanup.py::test_a_controller_that_comes",
    "tests/e2e/ray/test_cleanup.py::test_a_job_that_was_refused",
    "tests/e2e/ray/test_cleanup.py::test_a_job_whose_controller_cannot",
    "tests/e2e/ray/test_cleanup.py::test_a_request_counts",
    "tests/e2e/ray/test_cleanup.py::test_keys_of_an_earlier_job",
    "tests/e2e/ray/test_jobs_api.py::test_a_killed_driver_is_replaced",
    "tests/e2e/ray/test_jobs_api.py::test_inside_the_cluster_auto",
    "tests/e2e/ray/test_jobs_api.py::test_stopping_the_ray_job_cancels_the_training_job",
    "tests/e2e/ray/test_jobs_api.py::test_the_example_runs_unchanged",
    "tests/e2e/ray/test_jobs_api.py::test_the_name_of_a_job_that_has_ended",
    "tests/e2e/ray/test_jobs_api.py::test_the_quickstart",
    # Object storage, and one that is away for half a minute; test_restore_requests reads from it,
    # and tests/sim/test_storage_faults.py has the outages in virtual time.
    "tests/e2e/storage/test_kill_points.py::test_a_stopped_writer_leaves_a_whole_step[f",
    "tests/e2e/storage/test_kill_points.py::test_a_stopped_writer_leaves_a_whole_step[r",
    "tests/e2e/storage/test_kill_points.py::test_a_stopped_writer_leaves_a_whole_step[save, and d",
    "tests/e2e/storage/test_s3.py",
    "tests/e2e/storage/test_unwritable.py",
    # Of the frameworks CI has killed workers, a lost node, hangs, planned stops, state in memory;
    # shrinking is in tests/e2e/local, torn checkpoints in tests/unit/workers/agent/storage, phases
    # of evaluations in tests/frameworks/test_phases.py. test_examples kills the others' workers.
    "tests/frameworks/test_evaluations.py",
    "tests/frameworks/test_recovery.py::test_a_job_without_a_replacement",
    *(f"{_KILLED}[{name}]" for name in ["accelerate", "ddp", "hf", "lightning", "trl", "zero1"]),
    "tests/frameworks/test_recovery.py::test_a_lost_node_is_replaced_and_the_script_goes_on[ddp]",
    "tests/frameworks/test_recovery.py::test_a_lost_node_is_replaced_and_the_script_goes_on[light",
    "tests/frameworks/test_recovery.py::test_a_suspended_script",
    "tests/frameworks/test_recovery.py::test_the_steps_of_the_trainer",
    "tests/frameworks/test_recovery.py::test_a_torn_newest_checkpoint",
    "tests/frameworks/test_resumed_trainers.py::test_a_killed_worker",
    "tests/frameworks/test_zero_sizes.py",
)
