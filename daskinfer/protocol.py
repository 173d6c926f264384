"""Every message that passes between client, scheduler and worker.

The wire format is Dask's: each message is a dict with an ``op``, msgpack on the
stream comms, handled by the function registered under that name. Nothing here
opens a connection, so TLS, proxies and compression are whatever the cluster
already has.

Small payloads (at most a few tens of KiB) travel as one ``bytes`` inside the
message; larger ones as a list of frames that Dask sends without copying. The
scheduler forwards both unread.

::

    client            scheduler                       worker
      │  submit         │                               │
      ├────────────────►│  (queue, batch, place)        │
      │                 │  run                          │
      │                 ├──────────────────────────────►│
      │                 │                        done   │
      │  key-in-memory  │◄──────────────────────────────┤
      │◄────────────────┤                               │
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypedDict

from dask.typing import Key

#: Streams: client to scheduler.
SUBMIT = "daskinfer-submit"

#: Streams: client to scheduler to worker.
READ = "daskinfer-stream-read"

#: Streams: worker to scheduler to client.
CHUNKS = "daskinfer-stream-chunks"

#: Streams: scheduler to worker.
RUN = "daskinfer-run"
DROP = "daskinfer-drop"
LOAD = "daskinfer-load"
UNLOAD = "daskinfer-unload"
ACTIVATE = "daskinfer-activate"
REPLACE = "daskinfer-replace"
TAKE = "daskinfer-take"

#: Streams: scheduler to client.
ANSWERS = "daskinfer-answers"
REST = "daskinfer-rest"

#: Streams: worker to scheduler.
HELLO = "daskinfer-hello"
WARMING = "daskinfer-warming"
LOADED = "daskinfer-loaded"
UNLOADED = "daskinfer-unloaded"
PARKED = "daskinfer-parked"
PROGRESS = "daskinfer-progress"
DONE = "daskinfer-done"
CACHED = "daskinfer-cached"
NOT_FOUND = "daskinfer-not-found"
WANTS = "daskinfer-wants"
GOT = "daskinfer-got"
NOT_GOT = "daskinfer-not-got"
LEAVES = "daskinfer-leaves"
SLOTS = "daskinfer-slots"
ENDED = "daskinfer-stream-ended"

#: Calls (request and answer) to the scheduler.
DEPLOY = "daskinfer_deploy"
WAIT_READY = "daskinfer_wait_ready"
UNDEPLOY = "daskinfer_undeploy"
UPDATE = "daskinfer_update"
CHANGE = "daskinfer_change"
DESCRIBE = "daskinfer_describe"
STATUS = "daskinfer_status"
INFO = "daskinfer_info"
STORY = "daskinfer_story"
ARTIFACT = "daskinfer_artifact"
GATHER = "daskinfer_gather"
CLEAR = "daskinfer_clear"
OFFER = "daskinfer_offer"
UPLOAD = "daskinfer_upload"
WITHDRAW = "daskinfer_withdraw"

#: Calls to a worker.
FETCH = "daskinfer_fetch"
CACHE_STATISTICS = "daskinfer_cache_statistics"
CACHE_CLEAR = "daskinfer_cache_clear"
RECALL = "daskinfer_recall"

#: Calls to both.
CHUNK = "daskinfer_chunk"

#: What a batch may wait for but its turn: inputs from other workers, a user's task that
#: holds the device, or what is looked up in the worker's cache.
INPUTS = "inputs"
DEVICE = "device"
CACHE = "cache"

#: Where a worker found the weights that it loaded: in its own memory, off the device,
#: or in the files of its host.
HOST = "host"
DISK = "disk"

#: How a model answers: with one result for each request; piece by piece; piece by
#: piece from an asynchronous generator, which does not keep the device; or in steps
#: that all its requests on a device take together.
PLAIN = ""
STREAM = "stream"
ASYNC_STREAM = "async-stream"
STEPS = "steps"

#: Instead of a number of chunks that were read: whoever reads does not hold up the
#: model any more; or nobody reads any more.
OPEN = -1
LEFT = -2

#: One request's pickled ``(args, kwargs)``: one ``bytes``, or frames that Dask
#: carries out of band (wrapped in ``Serialize`` when sent, ``bytes`` or
#: ``memoryview`` when received by a worker).
Payload: TypeAlias = "bytes | list[Any]"


class StreamOrder(TypedDict):
    """How the answer of a request is to be streamed to its client.

    If its client is to ``read`` the chunks, no more than ``nbytes`` and ``chunks`` are
    to be unread. Where it is not to ``keep``, there is no result but None; else there
    is what ``combine`` makes of all chunks: a pickled function, or None for a list of
    them. With ``replay`` another attempt may go on for one that failed, and leaves out
    the first ``skip`` chunks, which the client has.
    """

    read: bool
    nbytes: int
    chunks: int
    keep: bool
    combine: bytes | None
    replay: bool
    skip: int


class SubmitMessage(TypedDict):
    """Many requests of one handle and one set of options.

    The lists run in parallel. ``signatures`` holds None where the inputs are
    futures, whose shapes nobody knows yet. Results of a batch that are no larger than
    ``inline`` bytes together shall come unasked. ``contents`` hold, by position, the
    hashes of what requests say, where results are cached. All answers are to be
    streamed as ``stream`` says, or none is.
    """

    op: str
    name: str
    version: str | None
    keys: list[Key]
    payloads: list[Payload]
    signatures: list[str | None]
    rows: list[int]
    dependencies: dict[int, list[Key]]
    priority: float
    retries: int
    workers: list[str | int] | None
    allow_other_workers: bool
    resources: dict[str, float] | None
    inline: int
    timeout: float | None
    contents: dict[int, bytes]
    stream: StreamOrder | None


class RunMessage(TypedDict):
    """One batch for one worker.

    ``pass_sizes`` are the rows of its first forward passes where the batch is to
    be cut, ``pass_rows`` those of all others. Results of up to ``inline`` bytes
    together come back with the answer. ``contents`` are the hashes of its requests,
    where clients have told; empty if none has. What is ``held`` should be in the
    worker's cache. Of those in ``streams``, chunks are sent on; a model that gives none
    for ``idle_timeout`` seconds has stalled.
    """

    op: str
    batch: str
    name: str
    version: str
    keys: list[Key]
    payloads: list[Payload]
    who_has: dict[Key, list[str]]
    pass_sizes: list[int]
    pass_rows: int
    inline: int
    contents: list[bytes | None]
    held: bool
    streams: dict[Key, StreamOrder]
    idle_timeout: float | None
    stimulus_id: str


class DropMessage(TypedDict):
    """These requests of a batch are not wanted any more."""

    op: str
    batch: str
    keys: list[Key]
    stimulus_id: str


class LoadMessage(TypedDict):
    """Load this version, warm it, and say so; ``load`` tells loads apart.

    ``active`` is the version of the deployment that answers now. ``after`` are the
    numbers of messages to unload whose memory must be free before this is built. Of one
    that is loaded ``again`` it is known what passes take.
    """

    op: str
    name: str
    version: str
    load: int
    active: str
    digest: str
    device: str
    resources: dict[str, float] | None
    policy: dict[str, Any]
    cache: dict[str, Any] | None
    after: list[int]
    again: bool
    stimulus_id: str


class UnloadMessage(TypedDict):
    """Forget this version, and say when its memory is free.

    ``unload`` tells such messages apart. What is to ``keep`` may be wanted again: it
    stays in the host's memory, off the device, if there is room.
    """

    op: str
    name: str
    version: str
    unload: int
    keep: bool
    stimulus_id: str


class ActivateMessage(TypedDict):
    """Another version answers from now on; batches before it are not concerned."""

    op: str
    name: str
    version: str
    stimulus_id: str


class WarmingMessage(TypedDict):
    """A model is built, and is run in now."""

    op: str
    name: str
    version: str
    load: int


class UnloadedMessage(TypedDict):
    """What a version took is free."""

    op: str
    name: str
    version: str
    unload: int


class ParkedMessage(TypedDict):
    """A version is in a worker's host memory, off the device; or is there no more.

    Nothing is said when it is loaded from there, or was to be unloaded for good.
    """

    op: str
    name: str
    version: str
    parked: bool


class ReplaceMessage(TypedDict):
    """The device is broken: let the Nanny start the process anew."""

    op: str
    reason: str
    stimulus_id: str


class TakeMessage(TypedDict):
    """Fetch this chunk from there: a worker's address, or none for the scheduler.

    ``weights`` are named by the key of their chunks, here and in the next messages.
    """

    op: str
    weights: str
    chunk: int
    source: str
    stimulus_id: str


class WantsMessage(TypedDict):
    """A worker wants all chunks of some weights, and passes on those that it has.

    ``have`` is a mask: bit 0 of the first byte stands for chunk 0, and so on.
    """

    op: str
    weights: str
    have: bytes


class GotMessage(TypedDict):
    """A worker has a chunk, or could not get it, for a ``reason``."""

    op: str
    weights: str
    chunk: int
    source: str
    reason: str


class LeavesMessage(TypedDict):
    """A worker neither wants any chunk nor passes one on."""

    op: str
    weights: str


class HelloMessage(TypedDict):
    """A worker's runtime is set up; ``devices`` maps kind to device class.

    ``room`` are the bytes that models may take, by kind of device. A kind is absent
    where there is no limit, or where finding out would open a device that the worker
    has not declared.
    """

    op: str
    devices: dict[str, str]
    reasons: dict[str, str]
    room: dict[str, int]


class Recalled(TypedDict):
    """What a worker remembers of a batch; how many seconds ago it came, and so on.

    None where it has not begun to run, was not run at all, or has not ended.
    """

    batch: str
    device: str
    came: float
    began: float | None
    ended: float | None


class Failure(TypedDict):
    """An exception as Dask ships it."""

    exception: Any
    traceback: Any
    exception_text: str
    traceback_text: str


class LoadedMessage(TypedDict):
    """A load ended. ``timings`` are ``(rows, seconds)`` of the warm-up.

    ``nbytes`` is what the weights take, 0 if the load failed. They came from a
    ``source``: :data:`HOST`, :data:`DISK`, or empty for elsewhere, or nowhere. The
    model answers as its ``kind`` says, as far as can be seen; see :data:`STREAM`.
    ``broken`` says why nothing runs on the device any more, if that came of it.
    """

    op: str
    name: str
    version: str
    load: int
    digest: str
    failure: Failure | None
    device: str
    device_class: str
    timings: list[tuple[int, float]]
    seconds: float
    nbytes: int
    source: str
    kind: str
    broken: str


class Pass(TypedDict):
    """One forward pass: what it held, what it was padded to, what it took."""

    rows: int
    padded: int
    requests: int
    seconds: float


class Pack(TypedDict):
    """Small results, packed by :func:`daskinfer.transport.pack`."""

    header: bytes
    frames: list[Any]


class RestMessage(TypedDict):
    """A client need not say for some seconds what its requests to a deployment say."""

    op: str
    name: str
    seconds: float


class AnswersMessage(TypedDict):
    """Small results for the client that asked, ahead of the word that they exist.

    ``places`` are those of ``keys`` among the values of the pack.
    """

    op: str
    keys: list[Key]
    places: list[int]
    pack: Pack


class ProgressMessage(TypedDict):
    """A batch cannot begin yet, or has begun after it could not.

    It ``waits_for`` :data:`INPUTS`, :data:`DEVICE`, :data:`CACHE`, or nothing more. Of
    a batch that only waits for those before it nothing is said.
    """

    op: str
    batch: str
    waits_for: str


class DoneMessage(TypedDict):
    """A batch ended on a worker.

    ``type_index`` points into ``types`` and ``typenames``, as most results of a
    batch are of one type. ``out_of_memory`` is 0, or the rows of the smallest pass
    that did not fit the device. Seconds are durations measured on the worker: from the
    arrival of the batch to the start of its first pass, and from there to the
    end of its last. ``pack`` holds the values of ``keys`` where they are small;
    ``cached`` are the places of those that were not computed for their request,
    ``look_up`` the seconds that it took to look for all, and ``kept`` names what is in
    the worker's cache from now on. Those that are ``streaming`` have only begun: more
    will be said of them, by :class:`ChunksMessage` and :class:`EndedMessage`.

    ``broken`` says why nothing runs on the device any more, and is empty as long as
    something does. The pass that found out held those ``struck``. Of what should
    have come after it the message says nothing: it has not run, nor have batches that
    came later, each of which is answered so.
    """

    op: str
    batch: str
    keys: list[Key]
    nbytes: list[int]
    type_index: list[int]
    types: list[bytes]
    typenames: list[str]
    failed: dict[Key, Failure]
    missing: list[Key]
    passes: list[Pass]
    cached: list[int]
    look_up: float
    kept: bytes
    streaming: list[Key]
    out_of_memory: int
    waited: float
    ran: float
    device: str
    pack: Pack | None
    struck: list[Key]
    broken: str
    stimulus_id: str


class ChunksMessage(TypedDict):
    """Chunks of some streams of a batch: those from number ``firsts``, ``counts`` each.

    Of some there are ``more``, which wait until these are read. Clients are not told
    the batch.
    """

    op: str
    batch: str
    keys: list[Key]
    firsts: list[int]
    counts: list[int]
    nbytes: list[int]
    more: list[bool]
    packs: list[Pack]


class ReadMessage(TypedDict):
    """How many chunks of some streams their readers have ``taken``, from the beginning.

    -1 says that they wait for the whole: whatever is unread, the model is to go on. -2
    says that nobody reads any more. Workers are told the batch.
    """

    op: str
    keys: list[Key]
    taken: list[int]


class EndedMessage(TypedDict):
    """Some streams of a batch have ended, after as many chunks as ``counts`` say.

    The fields are as in :class:`DoneMessage`. If the device is ``broken``, this is said
    of no stream: all that it had have ended, and nothing more is said of them.
    """

    op: str
    batch: str
    keys: list[Key]
    nbytes: list[int]
    type_index: list[int]
    types: list[bytes]
    typenames: list[str]
    failed: dict[Key, Failure]
    counts: dict[Key, int]
    device: str
    pack: Pack | None
    broken: str
    stimulus_id: str


class SlotsMessage(TypedDict):
    """How many requests of a model shall advance together, and seconds of a step then.

    Of models that answer in :data:`STEPS`; as far as is known by now.
    """

    op: str
    name: str
    version: str
    slots: int
    seconds: float


class NotFoundMessage(TypedDict):
    """A batch that should be in the worker's cache is not, and waits for the device.

    ``dropped`` names what is not there, as in :class:`CachedMessage`.
    """

    op: str
    batch: str
    dropped: bytes


class CachedMessage(TypedDict):
    """What else has come into a worker's cache of results, and what is there no more.

    Each is named by its first eight bytes, all in one text.
    """

    op: str
    name: str
    added: bytes
    dropped: bytes
