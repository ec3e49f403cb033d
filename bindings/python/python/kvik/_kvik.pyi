"""The native part of kvik. Everything here is exported by `kvik` itself."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import final

__version__: str

class KvikError(Exception):
    """Something that kvik could not do."""

class InvalidValueError(KvikError):
    """A value that is not allowed: correct it."""

class StoreGoneError(KvikError):
    """There is no store daemon, or it was lost: go on without it."""

class RefusedError(KvikError):
    """The store daemon does not serve this client."""

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
    def slowest_tier(self) -> str: ...

@final
class Job:
    """Something that runs in the background, such as a load."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
    @property
    def result(self) -> int:
        """Chunks for loads and saves, tokens for lookups; 0 where it failed, was cancelled or is not done."""
    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the end; says whether it came in time."""
    def cancel(self) -> bool:
        """Keeps it from starting; says whether it has not started and will not."""
    def __repr__(self) -> str: ...

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
    ) -> Store:
        """Attaches to the store daemon at `socket`. A daemon that is not there yet is no error."""
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
        self, chain: Chain, first_block: int, memory: EngineMemory, blocks: Sequence[int], *, after: int | None = None
    ) -> Job:
        """Begins to read blocks of whole chunks; the job's result is how many came, from the first on."""
    def start_save(
        self, chain: Chain, first_block: int, memory: EngineMemory, blocks: Sequence[int], *, after: int | None = None
    ) -> Job:
        """Begins to write blocks of whole chunks from `first_block` on; `blocks` begins with the chain."""
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
