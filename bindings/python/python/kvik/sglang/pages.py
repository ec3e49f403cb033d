"""The pages of a pool in the store of the node: one chunk a page."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import kvik
from kvik.sglang.memory import PageMemory
from kvik.sglang.names import PageNames, weight_version
from kvik.sglang.settings import Settings

logger = logging.getLogger(f"sglang.{__name__}")

# Keys that one question to the store is about.
MAX_KEYS = 4096

# Time between two looks at a daemon that is not there.
LOOK_INTERVAL_S = 1.0


class Pages:
    """A session with the store. Whatever fails is a miss: nothing here raises in SGLang's threads.

    A page is a chunk of the daemon, whatever tokens the daemon counts in one. The daemon may come later, go, and come back
    with other settings.
    """

    def __init__(self, settings: Settings, names: PageNames, page_bytes: int, memory: PageMemory | None) -> None:
        self.settings = settings
        self.names = names
        self.page_bytes = page_bytes
        self.page_memory = memory
        self.store: kvik.Store | None = None
        self.memory: kvik.EngineMemory | None = None
        self.chunk_tokens: int | None = None
        self.last_error: str | None = None
        self.lock = threading.Lock()
        self.next_look_s = 0.0
        self.is_closed = False

    # === Questions and copies ===

    def n_found(self, keys: Sequence[str], is_request: bool = True) -> int:
        """How many of the pages the store has, from the first on; a request tells the eviction policies of them."""
        n_found = 0
        for first in range(0, len(keys), MAX_KEYS):
            part = keys[first : first + MAX_KEYS]
            n_part = self.guarded(lambda store, part=part: self.look_up(store, part, is_request))
            n_found += n_part
            if n_part < len(part):
                break
        return n_found

    def are_found(self, keys: Sequence[str]) -> list[bool]:
        """Which of the pages the store has."""
        found: list[bool] = []
        # Where one is missing its neighbours often are, so the next is asked for alone.
        n_asked = MAX_KEYS
        while len(found) < len(keys):
            part = keys[len(found) : len(found) + n_asked]
            n_part = self.guarded(lambda store, part=part: self.look_up(store, part, False))
            found += [True] * n_part + [False] * (n_part < len(part))
            n_asked = MAX_KEYS if n_part == len(part) else 1
        return found

    def load(self, keys: Sequence[str], pages: Sequence[int], memory: PageMemory | None = None) -> int:
        """Reads pages into the pool, or into other memory; how many came, from the first on."""
        return self.guarded(
            lambda store: self.finish(store.start_load(self.chain(store, keys), 0, self.native(memory), list(pages)))
        )

    def save(self, keys: Sequence[str], pages: Sequence[int], memory: PageMemory | None = None) -> int:
        """Writes pages of the pool, or of other memory; how many are stored, from the first on."""
        return self.guarded(
            lambda store: self.finish(store.start_save(self.chain(store, keys), 0, self.native(memory), list(pages)))
        )

    def clear(self) -> bool:
        """Forgets all pages of this namespace, of all ranks; says whether that was done."""
        return self.guarded(lambda store: len(store.clear())) > 0

    def look_up(self, store: kvik.Store, keys: Sequence[str], is_request: bool) -> int:
        chain = self.chain(store, keys)
        n_found = store.lookup(chain).n_chunks
        if is_request and self.names.rank == 0:
            store.note_request(chain)
        return n_found

    def chain(self, store: kvik.Store, keys: Sequence[str]) -> kvik.Chain:
        version = weight_version()
        return store.chain_of_keys([f"{version}/{key}".encode() for key in keys])

    def native(self, memory: PageMemory | None) -> kvik.EngineMemory:
        native = self.memory if memory is None else memory.native(self.chunk_tokens)
        if native is None:
            raise kvik.StoreGoneError("the session was ended meanwhile")
        return native

    @staticmethod
    def finish(job: kvik.Job) -> int:
        """Waits for a copy. The pages are SGLang's again when this returns, so nothing may touch them any more."""
        try:
            job.wait()
        finally:
            if not job.cancel():
                job.wait()
        return job.result

    def guarded(self, ask: Callable[[kvik.Store], int]) -> int:
        store = self.session()
        if store is None:
            return 0
        try:
            return ask(store)
        except kvik.StoreGoneError as error:
            self.last_error = str(error)
        except kvik.KvikError as error:
            self.last_error = str(error)
            logger.warning("kvik: %s", error)
        return 0

    # === Session ===

    @property
    def is_attached(self) -> bool:
        return self.session() is not None

    def session(self) -> kvik.Store | None:
        """The session while there is a daemon that has pages as chunks."""
        store, chunk_tokens = self.store, self.chunk_tokens
        if store is not None and store.is_attached and store.chunk_tokens == chunk_tokens:
            return store
        with self.lock:
            if self.is_closed or time.monotonic() < self.next_look_s:
                return None
            try:
                return self.attached()
            finally:
                # From now on, because a daemon that hangs takes long to look at.
                self.next_look_s = time.monotonic() + LOOK_INTERVAL_S

    def attached(self) -> kvik.Store | None:
        """Attaches, or attaches anew where the daemon counts tokens otherwise. The caller has the lock."""
        chunk_tokens, error = daemon_chunk_tokens(self.settings)
        if chunk_tokens is None:
            self.note_error(error)
            return None
        if self.page_bytes % chunk_tokens != 0:
            self.note_error(
                f"a page of {self.page_bytes} bytes is no chunk of {chunk_tokens} tokens; allowed: "
                "a divisor of the page's bytes (--set tiers.chunk_tokens=N of the daemon, or another --page-size)"
            )
            return None
        if self.store is None or self.chunk_tokens != chunk_tokens:
            if self.store is not None:
                self.store.close()
            self.store = self.attach(chunk_tokens)
            self.memory = None if self.page_memory is None else self.page_memory.native(chunk_tokens)
            self.chunk_tokens = chunk_tokens
        # A session that was lost comes back by itself within a moment.
        if not self.store.wait_attached(LOOK_INTERVAL_S) or self.store.chunk_tokens != chunk_tokens:
            self.note_error(self.store.last_error)
            return None
        if self.last_error is not None:
            logger.info("kvik: the store at %s is there", self.settings.socket)
            self.last_error = None
        return self.store

    def attach(self, chunk_tokens: int) -> kvik.Store:
        names = self.names
        return kvik.Store.attach(
            self.settings.socket,
            model=names.model,
            layout=names.layout,
            dtype=names.dtype,
            n_layers=1,
            token_layer_bytes=self.page_bytes // chunk_tokens,
            block_tokens=chunk_tokens,
            rank=names.rank,
            n_ranks=names.n_ranks,
            token=self.settings.token(),
            timeout_s=self.settings.timeout_s,
            n_copy_threads=self.settings.copy_threads,
        )

    def note_error(self, error: str | None) -> None:
        """Says once why there is no store."""
        error = error or "there is no store daemon"
        if error != self.last_error:
            logger.warning("kvik: SGLang goes on without the store: %s", error)
        self.last_error = error

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            store, self.store = self.store, None
        if store is not None:
            store.close()


def daemon_chunk_tokens(settings: Settings) -> tuple[int | None, str | None]:
    """Tokens of the daemon's chunks, or why there is no daemon: what a format must fit to."""
    probe = kvik.Store.attach(
        settings.socket,
        model="kvik",
        layout="tokens-of-a-chunk",
        dtype="u8",
        n_layers=1,
        token_layer_bytes=1,
        block_tokens=1,
        token=settings.token(),
        timeout_s=settings.timeout_s,
        n_copy_threads=1,
    )
    with probe:
        return probe.chunk_tokens, probe.last_error
