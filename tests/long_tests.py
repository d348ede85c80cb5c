"""Tests that run with `--all` only (`make test-all`): on two cores most of the time of the
end-to-end tests. Every mechanism and every backend is tested without them; they add rarer cases.

A row is the beginning of test ids, and how they go on, each after a "; ".
"""

_LOSSES = "strategies/test_losses.py::test_losses_and_gradient_norms_are_those_of_one_process["
_KILLED = "test_a_killed_worker_costs_the_steps_since_the_scripts_checkpoint["
_KEPT = "test_losses_after_kills_at_random_moments_are_those_of_an_undisturbed_job["
_LOST = "test_a_lost_node_is_replaced_and_the_script_goes_on["
_WARM_UP = "test_a_warm_up_leaves_no_group_no_random_state_and_no_threads_behind[entrypoint"
_TRACED = "test_accuracy.py::test_the_plan_is_what_a_traced_step_needs_and_sends["
_NODES = "e2e/kubernetes/nodes/test_"
_LONG = {
    # Import contracts say it of the text, in a second; here each part is really removed. `make
    # check` checks types: 100 s of a core in a fresh clone.
    "tidy/test_": "removable.py::test_a; removable.py::test_the; "
    "tools.py::test_the_tools_report_no_problem[types",
    # Every strategy through kills, resizes and reshards, and its variants; the rest of test_losses
    # trains each axis, and tests/e2e/local has the faults with FSDP, HSDP and DDP.
    "strategies/test_": "elastic; faults; own_loops; recipe; three_axes; variants",
    _LOSSES: "CP 2; NO; PP 2 x C; PP 2 x D; PP 2 x FSDP 2,; PP 2 x TP; PP 4; TP 2 x D; "
    "TP 2 x FSDP 2]",
    # Damage, full disks, a cache of compiled code, memory limits, a built wheel, files of the
    # user's with our names; test_kill, test_losses, test_hand_over have each kind of fault.
    "e2e/local/test_": "adopt; again; compile; damaged; full_; growth; host_memory; large_spec; "
    "last_incident; looking; name_collision; page; save; soak; state_pages; trackers; twins; wheel",
    "e2e/local/test_ends.py::test_": "a_job_whose; a_killed; a_script_that_leaves; an_interrupt; "
    "hook; neither; a_script_that_raises_at_once_fails_the_job_with_its_traceback[e",
    "e2e/local/test_entrypoints.py::test_": "a_session_in; an_unknown_option; launchers; uv_adds",
    "e2e/local/test_first_commands.py::test_": "the_; a_script_is_run_by_the_printed_commands[d; "
    "printed_commands_that_start_nothing_succeed[d",
    "e2e/local/test_hand_over.py::test_": "a_",
    "e2e/local/test_hangs.py::test_": "a_rank_that_",
    f"e2e/local/test_kept.py::{_KEPT}": "d; f; t",
    "e2e/local/test_kept.py::test_a_": "job_that_shrinks; "
    "resized_job_keeps_its_processes_and_its_training",  # a busy machine misses its second
    "e2e/local/test_kept.py::test_": "compiled_processes_start; "
    "survivors_of_kills_keep_what_they_have_compiled[i; whole_nodes",
    "e2e/local/test_kill.py::test_": "training_survives_its_node_launcher",
    "e2e/local/test_losses.py::test_": "a_job_that_shrinks",
    "e2e/local/test_outputs.py::test_a_job_that_succeeds_ends_with_0[": "c; f; l; u",
    "e2e/local/test_python_client.py::test_": "a_function; a_notebook",
    "e2e/local/test_silent_scripts.py::test_": "a_rank_that_sleeps; a_script_that_uses",
    "e2e/workers/test_": "shards",
    # More meshes and entry points than one; two real ranks where other tests of the file have one.
    f"unit/workers/agent/pool/test_warmup.py::{_WARM_UP}": "0; 1; 2; 3",
    "planner_accuracy/test_": "real_ranks",
    f"planner_accuracy/{_TRACED}": "AC; CP; FSDP; loss",
    "unit/preflight/test_real_hangs.py::test_": "the_script_hangs",
    "unit/workers/integrations/test_ray_train.py::test_": "two_ranks",
    "unit/workers/session/test_measures.py::test_": "the_second_step_of_a_real_group",
    "unit/workers/training/test_calibrate.py::test_": "two_workers",
    # Each rare order of an import and a fork but one.
    "e2e/agent/test_import_template.py::test_": "a_; more; w",
    "e2e/agent/test_preload.py::test_": "a_first_hsdp_step; "
    "modules_of_the_job_are_imported_before_the_fork_unless_that_would_be_unsafe[names1",
    "e2e/agent/test_standalone.py::test_": "a_pod_that_never; a_user; modules_beside; the_store",
    # The test cluster itself; images with 3 GB of torch; two operators; a compile cache over pods.
    _NODES: "capacity; code_in_pods; commands_training; examples; images; installed; placement; "
    "rig",
    # A job that is deleted in another phase than recovery; losses of nodes.
    f"{_NODES}deletion.py::test_a_deleted_job_leaves_nothing[": "c; f; never; p; ru; s",
    f"{_NODES}pod_failures.py::test_": "a_pod_whose_label",
    f"{_NODES}training.py::test_": "a_drained; a_job_is_scaled; a_spare; a_suspended; partitioned; "
    "training_continues_after_a_power_loss; training_continues_while_the_api_server",
    # Many jobs, several operators and schedulers, a journal of a thousand pods; KubeRay, queues,
    # alerts by Prometheus's own program; upgrades, of which tests/unit/kube has the lost names.
    "e2e/kubernetes/test_": "journal_size; kuberay; monitoring; native_gangs; python_client; "
    "queue; replicas; scale; stores; two_releases; upgrade; waiting_jobs",
    "e2e/kubernetes/test_chart.py::test_": "an_operator_of_its_own; the_notes_warn",
    "e2e/kubernetes/test_code.py::test_": "the_directory",
    "e2e/kubernetes/test_command_refusals.py::test_": "kubectl; watching",
    "e2e/kubernetes/test_commands.py::test_": "a_request_that_waits; an_unanswered; watching",
    "e2e/kubernetes/test_missing_rights.py::test_without_the_right_to_": "create_e; create_s; d; w",
    "e2e/kubernetes/test_rights.py::test_": "a_missing_gang; "
    "a_message_goes_to_the_address_in_a_secret_and_nothing_else_has_it[n; "
    "the_page_has_no_button_for_what_its_reader_may_not_do[n; "
    "the_whole_life_of_a_job_needs_no_other_rights[n",
    # Clusters of their own (autoscaler, tokens, pip), a browser, several jobs at once. test_faults,
    # test_cleanup, test_jobs_api and the contract run a job on Ray and lose its parts.
    "e2e/ray/test_": "again; autoscaler; client; commands; dashboard; drain; gang; head; http; "
    "journal; kills; metrics; pip; placement; python_client; runtime_env; token; two_jobs; verbs",
    "e2e/ray/test_bad_input.py::test_": "a_script_that_the_nodes_lack; the_name_of_a_job_that_runs",
    "e2e/ray/test_cleanup.py::test_": "a_controller_that_comes; a_job_that_trains; a_job_that_was; "
    "a_job_whose_controller_cannot; a_request_counts; keys_of_an_earlier_job",
    "e2e/ray/test_jobs_api.py::test_": "a_killed_driver; inside_the_cluster; secrets; stopping; "
    "the_",
    # Object storage, and one that is away for half a minute; test_restore_requests reads from it,
    # and tests/sim/test_storage_faults.py has the outages in virtual time.
    "e2e/storage/test_": "s3; unwritable",
    "e2e/storage/test_kill_points.py::test_a_stopped_writer_leaves_a_whole_step[": "f; r; "
    "save, and d",
    # Of the frameworks CI has killed workers, a lost node, hangs, planned stops, state in memory;
    # shrinking is in tests/e2e/local, torn checkpoints in tests/unit/workers/agent/storage, phases
    # of evaluations in tests/frameworks/test_phases.py. test_examples kills the others' workers.
    "frameworks/test_": "evaluations; zero_sizes",
    "frameworks/test_recovery.py::test_": "a_job_without; a_suspended; a_torn; the_steps_of",
    f"frameworks/test_recovery.py::{_KILLED}": "accelerate; ddp; hf; lightning; trl; zero1",
    f"frameworks/test_recovery.py::{_LOST}": "ddp; light",
    "frameworks/test_resumed_trainers.py::test_": "a_killed_worker",
}
LONG = (
    "bench/gpu/test_kit.py::test_a_rehearsal",
    *(f"tests/{begin}{end}" for begin, ends in _LONG.items() for end in ends.split("; ")),
)
