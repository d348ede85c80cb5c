"""Every bound and default of Holdfast, with its unit and the reason for the number.

Owns: numbers. Must not: import anything, or be read from the environment.
"""

# -- what a spec may ask for ------------------------------------------------------------------
MAX_SECONDS = 315_360_000
"""Ten years: no job waits longer on purpose, and nanoseconds of it fit 64 bits thirty times."""

MAX_NODES = 100_000
"""Ten times the largest job that heartbeats are sized for; a plan lists every one of them."""

MAX_COUNT = 2**31 - 1
"""Of steps, samples and restarts: a step of 10 ms fills it in eight months."""

MAX_AXIS = 2**16
"""Workers along an inner axis of the mesh: the product of all three fits 64 bits."""

MAX_WIDTH = 2**20
"""Of a model's layers: sixty times the widest that is known. Its bytes fit 64 bits."""

MAX_LAYERS = 2**14
MAX_VOCABULARY = 2**24
"""A hundred times what the deepest and the most eloquent models have."""

MAX_SEQUENCE = 2**30
"""Tokens of one sample: a hundred times the longest context that is known."""

MAX_QUANTITY = 10**18
"""Bytes or cores: an exabyte, exact as a float and below the 2^63 of Kubernetes."""

MAX_SEED = 2**53 - 1
"""Integers that JSON keeps exact; a schema's bounds are such numbers too."""

MAX_DEPTH = 64
"""Levels of a document: a pod with all its affinities has twenty."""

MAX_VALUES = 100_000
"""Values of a document, each counted wherever an alias repeats it: a few lines can stand for more
than memory holds. Etcd takes no object that would need more."""

# -- the wire ---------------------------------------------------------------------------------
PROTOCOL_VERSION = 1
"""Spoken by agents and controllers; another number is refused at the first message."""

MAX_FRAME_BYTES = 16 * 2**20
"""One message. An inventory of 1,000 shards is below 200 kB; more is a broken peer."""

TOKEN_BYTES = 32
"""Entropy of a job's token: 256 bits, beyond guessing."""

RECONNECT_MIN_S = 0.05
RECONNECT_MAX_S = 2.0
"""Agent back-off to a controller that is gone: quick while it restarts, then sparing."""

LINK_TIMEOUT_S = 5.0
"""An agent drops a link whose data is not acknowledged for so long: past the heartbeat timeout the
controller has given the node up anyway, and a new controller waits to hear of it."""

CONTROLLER_ABSENCE_S = 900.0
"""An agent whose controller stays away this long ends its workers: none will collect them."""

# -- detection --------------------------------------------------------------------------------
HEARTBEAT_INTERVAL_S = 0.5
"""10,000 nodes at 2 Hz are a quarter of one core of the controller (DESIGN section 9)."""

HEARTBEAT_TIMEOUT_S = 3.0
"""Silence after which a node is lost: six beats, so one TCP retransmission storm is survived."""

ALL_SILENT_FACTOR = 4.0
"""Times the heartbeat timeout: how long a silence of all nodes is put down to our own machine
before it is believed. To give everybody up throws all memory away; to wait costs 9 s at most."""

PULSE_INTERVAL_S = 0.5
"""How often a worker's pulse thread tells its agent that the interpreter still runs."""

HANG_FLOOR_S = 3.0
"""A hang is never declared faster than this, however short the job's steps are."""

HANG_STEP_FACTOR = 3.0
"""... plus this many of the job's own step times (median of the recent ones)."""

HANG_SAMPLES = 5
"""Steps of this generation to see before the learned hang limit replaces the start-up limit."""

STARTUP_TIMEOUT_S = 600.0
"""Launch to first step: a cold NCCL start and a torch.compile on a thousand GPUs fit in."""

SAVE_TIMEOUT_S = 600.0
"""A worker that says it is evaluating, saving or compiling has this long between two signs."""

# -- stopping and starting --------------------------------------------------------------------
STOP_TIMEOUT_S = 10.0
"""SIGKILL to reaped is 50 ms for a 600 MB process; an agent that needs longer than this is lost."""

TERMINATION_GRACE_S = 30.0
"""SIGTERM to SIGKILL on planned stops of scripts, as torchrun and Kubernetes do."""

HOLD_S = 3.0
"""How long a worker that has staged a step on order waits for the end that was announced. It comes
within a round trip, unless it was called off or the controller has died: then training goes on."""

REPLACEMENT_WAIT_S = 2.0
"""How long a shrink waits for a replacement that is on its way: one start beats two."""

NODE_WAIT_S = 300.0
"""A promised node that has not dialled in after this is given back, and another one asked for."""

GROW_DELAY_S = 5.0
"""A node that arrives while training runs joins after this, so arrivals come in one resize."""

STACK_TIMEOUT_S = 2.0
"""Stacks of a hung worker are evidence, not worth delaying recovery for longer."""

# -- budgets (restarts per window) ------------------------------------------------------------
BUDGET_WINDOW_S = 3600.0
BUDGET_USER = 3
BUDGET_INFRASTRUCTURE = 20
BUDGET_PREEMPTION = 1000
BUDGET_HANG = 5
"""User errors repeat, machines fail: DESIGN section 5."""

BAD_NODE_STRIKES = 3
"""Incidents with this node as culprit within the window before it is cordoned."""

# -- checkpoints ------------------------------------------------------------------------------
STAGING_BUFFERS = 3
"""Per worker: one being written, one complete, one that may be pinned by an upload."""

MEMORY_EVERY_STEPS = 1
STORAGE_EVERY_STEPS = 100
KEEP_LAST = 2
"""Never fewer than two committed checkpoints while a third is being written."""

PERSIST_TIMEOUT_S = 600.0
"""How long a finishing or suspending job waits for its last checkpoint to be durable."""

# -- the journal and the report ---------------------------------------------------------------
PROGRESS_JOURNAL_INTERVAL_S = 1.0
"""Steps are journaled at most this often, without fsync: they carry no decision."""

JOURNAL_BYTES = 2 * 2**20
"""Records after which a journal is compacted: four hours of steps, replayed within a second."""

JOURNAL_FILES = 16
"""Compacted files kept as history for `holdfast events`: 32 MiB, three days of nothing but
steps."""

MAX_INCIDENTS_IN_FULL = 20
"""Interruptions whose traceback and stacks are kept; of older ones the rest of the record is."""

MAX_INCIDENT_STACK_BYTES = 128 * 1024
"""Stacks kept of one interruption: a thousand ranks wait in the same collective, a few tell why."""

MAX_TRACEBACK_BYTES = 16 * 1024
MAX_STACK_BYTES = 32 * 1024
