"""The native part of kvik. Everything here is exported by `kvik` itself."""

from collections.abc import Generator, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TypedDict, final

from typing_extensions import Buffer

class DlpackArray(Protocol):
    """An array of numpy, torch, jax and others."""

    def __dlpack__(self) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

Array = DlpackArray | Buffer

__version__: str

class KvikError(Exception):
    """Something that kvik could not do."""

class InvalidValueError(KvikError):
    """A value that is not allowed: correct it."""

class StoreGoneError(KvikError):
    """There is no store daemon, or it was lost: go on without it."""

class RefusedError(KvikError):
    """The store daemon does not serve this client."""

class StoreStats(TypedDict):
    """What a store has counted, and the state of its tiers."""

    chunk_tokens: int
    counts: dict[str, int]
    tiers: list[dict[str, Any]]

@final
class Chain:
    """The chunks of one sequence: what the store is asked for. Made by `Store.chain`."""

    @property
    def n_chunks(self) -> int:
        """Number of its chunks."""
    @property
    def n_tokens(self) -> int:
        """Tokens of all its chunks; those after the last whole chunk belong to none."""
    def names(self) -> list[bytes]:
        """The names of its chunks, 16 bytes each."""
    def pack(self, n_chunks: int) -> bytes:
        """Its first chunks without their tokens, 48 bytes each: for `Store.unpack` in another process."""
    def extended(self, tokens: Sequence[int]) -> Chain:
        """The chain of a longer sequence with the same salt and extra keys."""
    def __len__(self) -> int: ...
    def __repr__(self) -> str: ...

@final
class Found:
    """How much of a sequence the store has."""

    @property
    def n_chunks(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_memory_tokens(self) -> int:
        """The first of these tokens, which are in memory."""
    @property
    def slowest_tier(self) -> str: ...

@final
class Job:
    """Something that runs in the background, such as a load. `await` gives its result.

    It goes on when a task that awaits it is cancelled, and has the memory that it uses until it ends.
    """

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
    @property
    def result(self) -> int:
        """Chunks for loads and saves, tokens for lookups; 0 where it failed, was cancelled or is not done."""
    @property
    def found(self) -> Found | None:
        """What a lookup found; `None` for other jobs, where there is no daemon, and until it is done."""
    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the end; says whether it came in time."""
    def wait_layers(self, n_layers: int, timeout_s: float | None = None) -> bool:
        """Waits for the first layers of a load by layers; says whether all blocks have them in time.

        Where the load ends without them, that is known at once.
        """
    def abandon(self) -> None:
        """Gives a load by layers up: when this returns, nothing writes its blocks any more. It may end later."""
    def cancel(self) -> bool:
        """Keeps it from starting; says whether it has not started and will not."""
    def __await__(self) -> Generator[Any, None, int]: ...
    def __repr__(self) -> str: ...

@final
class LoadPlanner:
    """What an engine's passes and its loads from each tier took, and which of the two is faster."""

    def __init__(self) -> None: ...
    def note_pass(self, n_tokens: int, n_attended: int, seconds: float) -> None:
        """Takes a pass that computed `n_tokens`, which looked at `n_attended` together."""
    def begin_load(self, tier: str) -> MeasuredLoad:
        """Begins to measure a load from `tier`; loads of a tier that overlap share what it can do."""
    def is_load_faster(self, tier: str, n_bytes: int, first_token: int, end_token: int) -> bool | None:
        """Whether `n_bytes` of `tier` are there before the tokens have been computed; `None` where one was never measured."""
    def claim_measurement(self, tier: str, max_age_s: float) -> bool:
        """Whether loads from `tier` were not measured for so long; one caller gets that answer."""

@final
class MeasuredLoad:
    """A load that is under way."""

    def end(self, n_bytes: int) -> None:
        """Ends the load; one that brought no bytes says nothing."""

@final
class EngineMemory:
    """Blocks of an engine's KV memory, in pieces: one for each layer, or as many for every layer."""

    def __init__(
        self,
        pieces: Sequence[tuple[int, int, int]],
        *,
        n_blocks: int,
        block_tokens: int,
        owner: object,
        cuda_device: int | None = None,
    ) -> None:
        """`pieces` has the address, the bytes of a block and the bytes from one block to the next."""
    @staticmethod
    def from_tensors(arrays: Sequence[Array], *, block_tokens: int, block_axis: int = 0) -> EngineMemory:
        """The blocks of arrays where they lie: one array for each layer, or as many for every layer.

        Axes behind `block_axis` are the bytes of a block, without gaps and in C's order; each place of the axes before it
        is a piece of its own. The `layout` of the store must name shape and axis.
        """
    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all pieces."""
    def __repr__(self) -> str: ...

@final
class Store:
    """A session with the store of this node; it outlives the daemon, and is attached again when the daemon is back."""

    @staticmethod
    def attach(
        socket: str | PathLike[str],
        *,
        model: str,
        layout: str,
        dtype: str,
        n_layers: int,
        token_layer_bytes: int,
        block_tokens: int,
        rank: int = 0,
        n_ranks: int = 1,
        token: str | None = None,
        timeout_s: float = 10.0,
        n_copy_threads: int | None = None,
        idle_saves: bool = False,
    ) -> Store:
        """Attaches to the store daemon at `socket`. A daemon that is not there yet is no error.

        With `idle_saves`, threads that save run where no other thread needs the processor: for engines that compute on it.
        """
    @staticmethod
    def in_process(
        *,
        model: str,
        layout: str,
        dtype: str,
        n_layers: int,
        token_layer_bytes: int,
        block_tokens: int,
        rank: int = 0,
        n_ranks: int = 1,
        ram: str = "1GiB",
        nvme: str | None = None,
        remote: str | None = None,
        chunk_tokens: int = 256,
        n_copy_threads: int | None = None,
    ) -> Store:
        """Opens a store in this process."""
    @property
    def socket(self) -> Path | None:
        """Where other engines attach to a store in this process; `None` for the store of a daemon."""
    @property
    def is_attached(self) -> bool:
        """Whether a daemon serves this store now."""
    @property
    def last_error(self) -> str | None:
        """Why no daemon serves this store; `None` while one does."""
    def wait_attached(self, timeout_s: float) -> bool:
        """Waits for a daemon; says whether there is one in time."""
    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of a chunk; `None` while there is no daemon."""
    def client(self) -> Client:
        """A managing connection for the chunks of this store: pins, prefetches, clears."""
    def chain(
        self, tokens: Sequence[int], *, salt: str | None = None, extras: Sequence[tuple[int, bytes]] = ()
    ) -> Chain:
        """The chain of a sequence; `extras` is what its KV depends on beside tokens, each with its first token."""
    def chain_of_keys(self, keys: Sequence[bytes]) -> Chain:
        """The chunks that an engine has keys for, one key a chunk; each is found by its key alone."""
    def unpack(self, packed: bytes) -> Chain | None:
        """The chain that `Chain.pack` gave; `None` where it was made for another store, or there is no daemon."""
    def lookup(self, chain: Chain) -> Found:
        """How much of a chain the store has, from its first chunk on."""
    def start_lookup(self, chain: Chain) -> Job:
        """Begins a lookup; the job's result is the number of tokens."""
    def start_load(
        self,
        chain: Chain,
        first_block: int,
        memory: EngineMemory,
        blocks: Sequence[int],
        *,
        after: int | None = None,
        by_layers: bool = False,
        waiters_copy: bool = False,
    ) -> Job:
        """Begins to read blocks of whole chunks; the job's result is how many came, from the first on.

        With `by_layers` all blocks get their first layer first, and so on (`Job.wait_layers`); only for memory of the CPU. With
        `waiters_copy` too, the threads that wait for layers copy them: for an engine that computes on all processors.
        """
    def start_save(
        self,
        chain: Chain,
        first_block: int,
        memory: EngineMemory,
        blocks: Sequence[int],
        *,
        after: int | None = None,
        pin_s: float | None = None,
        ttl_s: float | None = None,
        priority: Literal["normal", "low"] = "normal",
    ) -> Job:
        """Begins to write blocks of whole chunks from `first_block` on; `blocks` begins with the chain.

        With `pin_s` the chain is kept in memory for so many seconds. With `ttl_s` chunks that are written are not served any
        more after so many seconds, and stay in memory; with a `priority` of `low` they leave before others.
        """
    def save(
        self,
        chain: Chain,
        array: Array,
        *,
        pin_s: float | None = None,
        ttl_s: float | None = None,
        priority: Literal["normal", "low"] = "normal",
    ) -> int:
        """Stores the KV of a chain from an array in memory of the CPU; returns the tokens that are stored.

        The array is contiguous with one axis, layer by layer, or has axes of layers and tokens first. With `pin_s` the
        chain is kept in memory for so many seconds; `ttl_s` and `priority` as in `start_save`.
        """
    def load(self, chain: Chain, out: Array) -> int:
        """Reads the KV of a chain into an array, as `save` takes it; returns the tokens that came.

        Tokens of the array behind those have any bytes.
        """
    def prepare(self, memory: EngineMemory) -> list[Job]:
        """Registers the store's memory with the GPU of `memory`."""
    def note_request(self, chain: Chain, n_generated_tokens: int | None = None) -> Job:
        """Tells the eviction policies of a request with this chain, once for each."""
    def clear(self) -> dict[str, int]:
        """Forgets everything in the namespace of this engine; how many chunks left each tier."""
    def close(self) -> None:
        """Waits for jobs that run, cancels those that wait, and detaches."""
    def __enter__(self) -> Store: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def __repr__(self) -> str: ...

@final
class Client:
    """A managing connection with the daemon of a store: statistics, lookups, prefetches, pins, moves, clears."""

    @staticmethod
    def attach(
        socket: str | PathLike[str],
        *,
        model: str,
        layout: str,
        dtype: str,
        n_layers: int,
        token_layer_bytes: int,
        block_tokens: int,
        rank: int = 0,
        n_ranks: int = 1,
        token: str | None = None,
        timeout_s: float = 10.0,
    ) -> Client:
        """A client for the chunks of engines that `Store.attach` describes with the same arguments."""
    def chain(
        self, tokens: Sequence[int], *, salt: str | None = None, extras: Sequence[tuple[int, bytes]] = ()
    ) -> Chain:
        """The chain of a sequence, as `Store.chain` makes it."""
    def stats(self) -> StoreStats:
        """What the store has counted, and the state of its tiers."""
    def lookup(self, chain: Chain, *, is_local: bool = False) -> dict[str, int]:
        """How many tokens of a chain each tier has, from the first chunk on."""
    def prefetch(self, chain: Chain, *, tier: str | None = None) -> Prefetch:
        """Begins to load a chain into the daemon's memory, from one tier alone where one is named."""
    def pin(self, chain: Chain, *, ttl_s: float | None = None) -> int:
        """Keeps a chain in the daemon's memory until it is unpinned as often, and for `ttl_s` seconds at most.

        Returns the tokens that are kept.
        """
    def unpin(self, chain: Chain) -> bool:
        """Takes one pin away, one without an end before one with; says whether there was one."""
    def relocate(self, chain: Chain, source: str, target: str, *, keeps_source: bool = False) -> int:
        """Moves a chain from one tier to another, or copies it; returns the chunks that are there."""
    def clear(self, chain: Chain | None = None, *, tiers: Sequence[str] | None = None) -> dict[str, int]:
        """Forgets a chain, or all chunks of these engines; returns how many chunks left each tier."""
    def close(self) -> None:
        """Ends the connection, and with it its prefetches; its pins stay."""
    def __enter__(self) -> Client: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Prefetch:
    """Chunks that the daemon loads into its memory; begun by `Client.prefetch`, and ended with that client."""

    def is_loading(self) -> bool | None:
        """Whether it still loads; `None` where its connection has ended, which ended it too."""
    def cancel(self) -> bool | None:
        """Ends it; says whether it still loaded, and `None` where its connection has ended."""

@final
class Index:
    """Which worker has how much of a prompt, from the KV events that vLLM and SGLang publish."""

    def __init__(self, *, block_tokens: int = 16, max_bytes: int = ...) -> None:
        """`block_tokens` is the length of the blocks that it counts in, whatever engines have."""
    def apply(
        self,
        worker: str,
        payload: bytes,
        *,
        rank: int | None = None,
        sequence: int | None = None,
        is_replay: bool = False,
    ) -> Literal["applied", "restarted", "duplicate", "gap"]:
        """Takes one message of a worker, msgpack as published; without a number it is the next.

        After `gap` replay from `due`, each with `is_replay`, or call `skip_gap`.
        """
    def due(self, worker: str, *, rank: int = 0) -> int:
        """The sequence number that is due from a worker."""
    def skip_gap(self, worker: str, next: int, *, rank: int = 0) -> bool:
        """Gives up on the messages before the number `next`; the worker is unsure from then on."""
    def find(self, tokens: Sequence[int]) -> list[WorkerMatch]:
        """How much of a prompt each worker has, those with most first."""
    def remove(self, worker: str, *, rank: int = 0) -> bool:
        """Forgets a worker's rank; says whether it was there."""
    @property
    def n_blocks(self) -> int:
        """Distinct blocks of all workers."""
    @property
    def n_bytes(self) -> int:
        """Bytes that the blocks of the index take."""
    def __repr__(self) -> str: ...

@final
class WorkerMatch:
    """What one worker has of a prompt."""

    @property
    def worker(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_device_tokens(self) -> int: ...
    @property
    def is_unsure(self) -> bool: ...
    def __repr__(self) -> str: ...

@final
class Memory:
    """KV memory that is as large as what is in use: addresses for all blocks, and pages behind those that are allocated.

    Blocks that are not allocated read as zeros; to write there ends the process.
    """

    def __init__(
        self,
        *,
        n_buffers: int,
        block_bytes: int,
        n_blocks: int,
        page_bytes: int = ...,
        max_bytes: int | None = None,
        cuda_device: int | None = None,
        group: str | None = None,
        directory: str | PathLike[str] = "/dev/shm",
        has_null_block: bool = False,
    ) -> None:
        """A block has `block_bytes` in each buffer. With `group` memory is granted by the ledger of the device.

        With `has_null_block`, block 0 is taken for good.
        """
    def alloc(self, n_blocks: int, *, timeout_s: float = 0.0) -> list[int] | None:
        """Takes blocks, and maps pages for them; `None` where there is not enough memory."""
    def free(self, blocks: Sequence[int]) -> None:
        """Gives blocks back, all of them or none."""
    def resize(self, max_bytes: int) -> None:
        """Bounds the memory; blocks in use stay, and more are not given meanwhile."""
    def trim(self) -> int:
        """Unmaps all pages without a block in use; returns how many."""
    def tensors(self) -> list[MemoryTensor]:
        """One tensor for each buffer, of all blocks."""
    @property
    def n_blocks(self) -> int:
        """Numbers of blocks; those that lie on two pages are never given."""
    @property
    def n_used_blocks(self) -> int:
        """Blocks that are in use."""
    @property
    def n_available_blocks(self) -> int:
        """The most blocks that `alloc` would give now."""
    @property
    def held_bytes(self) -> int:
        """Bytes of all pages that are mapped."""
    @property
    def limit_bytes(self) -> int:
        """The most bytes that may be held, if all others gave back what they can."""
    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all buffers."""
    @property
    def n_used_pages(self) -> int:
        """Pages with a block in use."""
    @property
    def n_parked_pages(self) -> int:
        """Pages that are mapped and free."""
    def __repr__(self) -> str: ...

@final
class PagedMemory:
    """One buffer of addresses, with memory behind the pages that are taken: for an engine that chooses its blocks itself.

    Pages that are not taken read as zeros; to write there ends the process. Libraries with DLPack take the whole buffer, as
    bytes with axes of pages and bytes.
    """

    def __init__(
        self,
        *,
        n_bytes: int,
        page_bytes: int = ...,
        max_bytes: int | None = None,
        cuda_device: int | None = None,
        group: str | None = None,
        directory: str | PathLike[str] = "/dev/shm",
    ) -> None:
        """Never more than `max_bytes` is held. With `group` memory is granted by the ledger of the device."""
    def take(self, pages: Sequence[int], *, timeout_s: float = 0.0) -> bool:
        """Takes pages, all of them or none; says whether there was memory for them. Waits for others to give memory back."""
    def interrupt(self) -> None:
        """Makes a `take` that waits, or else the next one that would, return at once."""
    def stop_waiting(self) -> None:
        """Tells that the pages that were refused last are not waited for any more."""
    def give_back(self, pages: Sequence[int]) -> None:
        """Gives pages back, all of them or none; they stay mapped for a second, or until others need their memory."""
    def note_starved(self) -> None:
        """Tells that the engine can do nothing until it gets the pages that were refused last."""
    def trim(self) -> int:
        """Unmaps all pages that are not taken; returns how many."""
    def wanted_bytes(self, *, timeout_s: float = 0.0) -> int:
        """Waits until others want memory that is taken here, or less may be held; returns the bytes, once."""
    @property
    def n_pages(self) -> int:
        """Number of pages."""
    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
    @property
    def address(self) -> int:
        """Where the first page lies."""
    @property
    def held_bytes(self) -> int:
        """Bytes of all pages that are mapped."""
    @property
    def claimable_bytes(self) -> int:
        """Bytes that may be held now, beside what others hold."""
    @property
    def limit_bytes(self) -> int:
        """Bytes that may be held if all others gave back what they can."""
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __repr__(self) -> str: ...

@final
class MemoryTensor:
    """All blocks of one buffer of a `Memory`, as bytes with axes of blocks and bytes, for `from_dlpack` of any library."""

    @property
    def address(self) -> int:
        """Where its first block lies."""
    @property
    def shape(self) -> tuple[int, int]:
        """Blocks, and bytes of a block."""
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
