"""Every default and every bound of spec and protocol, with its unit and the reason for the number.

A private retry pause stands where it is used. This module imports nothing.
"""

# -- bounds of the job spec -------------------------------------------------------------------
MAX_SECONDS = 315_360_000
"""Ten years: no job waits longer on purpose, and in nanoseconds it fits 64 bits thirty times."""

MAX_GPUS = 64
"""GPUs of one worker."""
MAX_SIZES = 64
"""World sizes in spec.elasticity."""
MAX_NODES = 100_000
"""Ten times the largest job that heartbeats are sized for. Also the bound of an inner mesh axis:
the product of three fits 64 bits."""

MAX_VARIABLE_BYTES = 128 * 1024
"""Bytes of one environment variable with its name: MAX_ARG_STRLEN of Linux. With a longer one no
program can be started (execve: E2BIG)."""

MAX_COMMAND_CHARS = 16 * 1024
"""Characters of entrypoint.command: far above any line that a person writes, and read within
milliseconds."""

MAX_RESUME_WORDS = 64
"""Words of entrypoint.resumeArgs."""

MAX_ENVIRONMENT_BYTES = 2**20
"""Bytes of spec.env: half of what Linux passes to a program, arguments included, with the usual
stack limit of 8 MiB."""

MAX_COUNT = 2**31 - 1
"""Steps, samples, restarts, layer widths: steps of 10 ms reach it in eight months."""

MAX_QUANTITY = 10**18
"""Bytes or cores: an exabyte, exact as a float and below the 2^63 of Kubernetes."""

MAX_SEED = 2**53 - 1
"""Integers that JSON keeps exact; a schema's bounds are such numbers too."""

MAX_DOCUMENT_BYTES = 3 * 2**19
"""Characters of a job spec, with aliases counted in full: 1.5 MiB, the default limit of etcd for a
request. A few lines of aliases can stand for more than memory holds."""

MAX_CODE_ARCHIVE_BYTES = 8 * 2**20
"""Bytes of a job's code on Kubernetes, compressed. It lies in nine ConfigMaps at most; etcd holds 2
GiB in all by default. Source code of 5 MB has 1 MB compressed."""

MAX_CODE_BYTES = 64 * 2**20
"""The same, unpacked; so much memory an agent needs for it."""

MAX_CODE_FILES = 10_000
"""The same; creating them takes a second."""

MAX_RAY_ARCHIVE_BYTES = 100 * 2**20
"""Compressed code of a job on Ray: the head takes no larger upload (client_max_size of Ray's
dashboard), and rejects one after the whole of it was sent."""

CODE_PART_BYTES = 960 * 1024
"""Bytes of the archive in one ConfigMap (which may hold 1 MiB) and in one message."""

# -- connections ------------------------------------------------------------------------------
RELEASE = "0.1.0"
"""The version of Holdfast: of the package, the images and the chart."""

PROTOCOL_VERSION = 1
"""Agents and controllers of another version are rejected at their first message."""

MAX_FRAME_BYTES = 16 * 2**20
"""One message. An inventory of 1,000 shards is below 200 kB; a larger message is a broken peer."""

MAX_GREETING_BYTES = 256 * 1024
"""The first message of a connection, which is not authenticated yet: the Hello of an agent with an
inventory of 1,000 shards, or a request of the command line."""

MAX_UNAUTHENTICATED_BYTES = 16 * 2**20
"""All such messages that a controller holds at a time; the connection that exceeds it is closed."""

GREETING_TIMEOUT_S = 10.0
"""Limit of a greeting at any port: TLS handshake and first message or HTTP request. It takes
milliseconds; a machine that is short of processors needs seconds."""

MAX_STRANGERS = 1024
"""Connections of a port that have not authenticated; with few descriptors, a quarter of them."""

MAX_DESCRIPTORS = 2**20
"""Open files that agents, controllers and workers allow themselves where the system sets no lower
limit: some programs close every possible one when they start."""

TOKEN_BYTES = 32
"""Entropy of a job's token: 256 bits, beyond guessing."""

RECONNECT_MIN_S = 0.05
RECONNECT_MAX_S = 2.0
"""Pauses of an agent between attempts to reconnect: short while the controller restarts, then
longer."""

CONNECT_TIMEOUT_S = 5.0
"""One attempt of an agent to connect: DNS (2 s), TCP and TLS."""

REJOIN_ALLOWANCE_S = 2 * CONNECT_TIMEOUT_S + RECONNECT_MAX_S
"""Seconds beside the heartbeat timeout that agents may take to find a new controller. An attempt
that began before the controller listened may use all its time, then comes a pause and another."""

LINK_TIMEOUT_S = 5.0
"""An agent closes a connection whose data is not acknowledged for this long: after the heartbeat
timeout the controller has declared the node lost, and a new controller waits for it to rejoin."""

CONTROLLER_ABSENCE_S = 900.0
"""An agent without a controller for this long stops its workers: no controller will return."""

# -- detection --------------------------------------------------------------------------------
HEARTBEAT_INTERVAL_S = 0.5
"""Interval of jobs with up to a thousand nodes."""

HEARTBEAT_TIMEOUT_S = 3.0
"""Time without heartbeat after which a node is lost: six heartbeats, so that TCP retransmissions
after packet loss do not lose a node."""

MAX_HEARTBEATS_PER_S = 2_000
"""Heartbeats of all agents of a job together: a controller spends up to 0.1 ms on each. Jobs with
more than a thousand nodes have a longer interval than HEARTBEAT_INTERVAL_S."""

MIN_HEARTBEATS_MISSED = 3
"""A node is lost after so many intervals at least, if the interval of its job is longer."""

ALL_SILENT_FACTOR = 4.0
"""Times the heartbeat timeout: how long all nodes may send no heartbeat before they are lost. If
all are missing, the controller's machine is probably the cause. Declaring every node lost discards
all in-memory checkpoints; waiting costs 9 s at most."""

PULSE_INTERVAL_S = 0.5
"""Seconds between two signals of a worker's pulse thread that the interpreter still runs."""

FIRST_PULSES_S = 0.1
"""Seconds between pulses of a script before it trains: they show the end of its recovery."""

BEGUN_COLLECTIVES = 8
"""A rank of a script that reports nothing trains when it has begun so many: DDP begins about five
when it is made, then some a step."""

HANG_FLOOR_S = 3.0
"""Shortest hang timeout, however short the job's steps are."""

HANG_STEP_FACTOR = 3.0
"""The hang timeout is the floor plus this many step times (median of the recent ones)."""

BUSY_TIMEOUT_S = 30.0
"""Hang timeout of a worker that computes, reads or compiles: a slow read and a recompilation take
seconds, and a restart costs about as much as this wait saves."""

WORST_GAP_FACTOR = 3.0
"""Times the longest time without progress that ended by itself, if that is more: some jobs pause
regularly."""

STARVED_FACTOR = 4.0
"""Times the hang timeout of a busy worker on a machine whose processes wait for the CPU."""

STARVED_PRESSURE = 0.75
"""Share of the time that runnable threads wait for the CPU, on a starved machine. Twice as many
threads as cores give 0.5, which is usual on one machine with several nodes."""

SUSPICION_LEAD_S = 1.0
"""Workers are inspected so long before the hang timeout: the answers come before the decision."""

IDLE_S = 1.0
"""Time without CPU use and I/O after which a process is idle: two measurements."""

QUIET_S = 0.5
"""I/O and children of a worker are measured when it has made no progress for this long."""

STRAGGLER_WINDOW = 13
"""Steps over which a worker takes the median of its working time: a rank that has become slow is
found after half of them, and named within 20 steps."""

STRAGGLER_STEPS = 4
"""A rank is named when it has been slow for so many steps without a pause."""

STRAGGLER_MAX_PRESSURE = 0.2
"""CPU pressure of a node from which no rank of it is named: its threads share cores, and their CPU
times vary with what the other threads do."""

PROBE_PAUSE = 1000
"""Time between two probes of a GPU, in times of a probe: 0.1 % of the GPU's time."""

STRAGGLER_SHARE = 0.17
STRAGGLER_DEVIATIONS = 6.0
STRAGGLER_SHARE_FEW = 0.25
STRAGGLER_MIN_RANKS = 4
"""A rank is slow if it works so much longer than the median of all ranks, or so many deviations,
whichever is more. With fewer ranks there is no deviation; the share is then larger."""

HANG_SAMPLES = 5
"""Steps of a generation after which the measured hang timeout replaces the start-up timeout."""

STARTUP_TIMEOUT_S = 600.0
"""Launch to first step: enough for a cold NCCL start and torch.compile on a thousand GPUs."""

SAVE_TIMEOUT_S = 600.0
"""Hang timeout while a worker evaluates, saves or compiles."""

# -- stopping and starting --------------------------------------------------------------------
STOP_TIMEOUT_S = 10.0
"""A 600 MB process is reaped 50 ms after SIGKILL; an agent that needs longer than this is lost."""

STOP_TIMEOUT_GPU_S = 60.0
"""The same for workers with GPUs: the driver unmaps up to 80 GB of device memory and tens of GB of
page-locked memory of each, one process after the other. A silent agent is lost much earlier, by its
heartbeat timeout."""

TERMINATION_GRACE_S = 30.0
"""SIGTERM to SIGKILL on planned stops of scripts, as with torchrun and Kubernetes."""

SAVE_GRACE_S = 10.0
"""Seconds for a rank to end a declared save in an unplanned stop, if it needs no peer: a few GB to
a local disk. A torn checkpoint costs more: all steps since the one before it."""

HALT_S = 1.0
"""Seconds for a worker that may be kept to leave its step when a peer has died: ending a collective
takes milliseconds. Then it is killed, and all are forked again."""

KEPT_S = 120.0
"""Seconds that a kept process may wait for its next seat, with all its memory."""

JOIN_WAIT_S = 120.0
"""A job grows after this, although workers of a node that joins still build: these start again.
Those that are ready wait for a seat at most as long again."""

HALT_WAIT_S = 5.0
"""Seconds that a rank whose peer is gone waits for the controller's decision, before it fails."""

HOLD_S = 3.0
"""Seconds that a worker that has staged a requested step waits for the planned stop. The stop comes
within a round trip, unless it was cancelled or the controller died; then training continues."""

REPLACEMENT_WAIT_S = 2.0
"""Seconds to wait for a replacement before a shrink: one restart is cheaper than two."""

NODE_WAIT_S = 300.0
"""A node that has not joined after this is released, and another one is requested."""

GROW_DELAY_S = 5.0
"""A node that joins while training runs gets ranks after this, so that several nodes cause one
resize."""

STANDBYS_WAIT_S = 60.0
"""A job grows after this, although the standbys of a node still import what the script imports:
large libraries take 10 to 20 s, several of them on a slow disk a minute."""

IMPORT_WAIT_S = 20.0
"""Seconds that a worker with a rank waits for an import of the script's libraries that serves all
workers of its node: on few cores that is quicker than one in each, and it may have begun before."""

LAUNCH_TIMEOUT_S = 15.0
"""A fork takes milliseconds. After this, and the waits that a launch may contain, a launch without
an answer is sent again; after as long again it failed."""

STACK_TIMEOUT_S = 2.0
"""Collecting the stacks of a hung worker delays recovery by this at most."""

QUESTION_TIMEOUT_S = 10.0
"""Limit for an agent's answer to a question of a user about its workers, beside what it has to
record."""

MAX_SHOWN_RANKS = 512
"""Ranks whose stacks a user gets by default; of a job with more, the first ones."""

MAX_ANSWER_BYTES = 4 * 2**20
"""Bytes of all stacks, or of one profile as it is sent (compressed)."""

MAX_PROFILE_S = 120.0

# -- budgets (restarts per window) ------------------------------------------------------------
BUDGET_WINDOW_S = 3600.0
BUDGET_USER = 3
BUDGET_INFRASTRUCTURE = 20
BUDGET_PREEMPTION = 1000
BUDGET_HANG = 5
"""Restarts per window. User errors repeat, so few are allowed; machines fail independently."""

BAD_NODE_STRIKES = 3
"""Incidents that a node may cause within the window before it is cordoned."""

# -- checkpoints ------------------------------------------------------------------------------
STAGING_BUFFERS = 3
"""Per worker: one being written, one complete, one that an upload may hold."""

BUDDY_NETWORK_PERCENT = 50
"""Share of a push's time in which it sends: half of the link stays for training even while a buddy
gets its copy."""

STAGING_BUDGET_PERCENT = 3.0
"""Share of the step time that staging may cost: at this much a checkpoint in memory is cheaper than
what it saves on any cluster that fails once a day."""

MAX_STAGING_INTERVAL = 1000
"""Steps between two stagings if only time limits them otherwise."""

STORAGE_EVERY_STEPS = 100
KEEP_LAST = 2
"""Never fewer than two committed checkpoints while a third is being written."""

PERSIST_TIMEOUT_S = 600.0
"""Seconds that a finishing or suspending job waits for its last checkpoint to be durable."""

MAX_MANIFEST_BYTES = 64 * 2**20
"""A manifest or a note in a directory; a manifest of 100,000 shards has half of it."""

MAX_HEADER_BYTES = 100 * 2**20
"""The header of a shard file: the limit of safetensors."""

# -- the journal and the report ---------------------------------------------------------------
PROGRESS_JOURNAL_INTERVAL_S = 1.0
"""Shortest time between two journal records of steps. They have no fsync: no decision depends on
them."""

JOURNAL_BYTES = 2 * 2**20
"""Records after which a journal is compacted: four hours of steps, replayed within a second."""

JOURNAL_FILES = 16
"""Compacted files kept as history for `holdfast debug events`: 32 MiB, three days of steps."""

LOG_BYTES = 64 * 2**20
"""Size at which the log of a rank, an agent or a controller is moved to `NAME.log.1`, which is
replaced: at most twice this much is kept, of a rank in each generation."""

LOG_GENERATIONS = 50
"""Generations whose logs are kept; each launch deletes older ones."""

MAX_INCIDENTS_IN_FULL = 20
"""Incidents whose traceback and stacks are kept; older ones keep the rest of their record."""

MAX_LAUNCH_INCIDENTS = 4
"""Incidents that the workers of a launch receive: the last one, and others only if no step was
finished between them."""

MAX_LAUNCH_INCIDENT_CHARS = 400
"""Characters of each text of such an incident: two sentences. It is an environment variable of each
worker."""

MAX_INCIDENT_STACK_BYTES = 128 * 1024
"""Stacks kept of one incident: a thousand ranks wait in the same collective, and a few show why."""

MAX_TRACEBACK_BYTES = 16 * 1024
MAX_STACK_BYTES = 32 * 1024
