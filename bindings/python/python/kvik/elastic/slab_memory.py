"""The memory behind slabs: takes and gives back their pages."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

import torch

import kvik
from kvik.elastic.slabs import PageTable, Piece, Slabs

logger = logging.getLogger(__name__)


class SlabMemory:
    """Slabs of an engine's blocks, with memory behind those that are taken.

    Invariant: the pages of every slab in `taken` are taken of `memory`, and no others.
    """

    def __init__(
        self, memory: kvik.PagedMemory, buffer: torch.Tensor, slabs: Slabs, pieces: Sequence[Piece]
    ) -> None:
        self.memory = memory
        # All pages, as bytes.
        self.buffer = buffer
        self.pages = PageTable(slabs, pieces, memory.page_bytes)
        self.taken: set[int] = set()
        self.has_warned = False
        # Where the engine begins its work on a device; None while all is done by its own thread, in the stream that is current there.
        self.stream: torch.cuda.Stream | None = None
        # Held while work of another thread is begun in that stream.
        self.stream_lock = threading.Lock()
        # Whether taken memory is used only when its zeros are written: others than the engine's stream write KV there.
        self.is_settled = False

    @property
    def slab_bytes(self) -> int:
        return self.pages.slab_bytes()

    @property
    def spare_bytes(self) -> int:
        """The most that any number of slabs takes beyond their own bytes, because their first and last pages are shared."""
        pages = self.pages
        is_aligned = all(
            piece.offset % pages.page_bytes == 0 and piece.stride * pages.slabs.slab_blocks % pages.page_bytes == 0
            for piece in pages.pieces
        )
        return 0 if is_aligned else 2 * len(pages.pieces) * pages.page_bytes

    @property
    def taken_bytes(self) -> int:
        return len(self.pages.n_slabs_of_page) * self.memory.page_bytes

    def take(self, slabs: Sequence[int]) -> bool:
        """Takes memory for all of the slabs, or for none; says whether there was so much."""
        try:
            return self.try_take(slabs)
        except kvik.InvalidValueError:
            # The books of pages are wrong: nothing can be trusted.
            raise
        except kvik.KvikError as error:
            # The device could not do it; it may the next time.
            self.note_failure(error)
            return False

    def try_take(self, slabs: Sequence[int], timeout_s: float = 0.0) -> bool:
        """As `take`, but waits up to `timeout_s` for memory, and raises where the device fails.

        New pages of a device are zeroed in the engine's stream: before all that it begins when this has returned.
        """
        pages = self.pages.missing(slabs)
        if pages and not self.memory.take(pages, timeout_s=timeout_s):
            return False
        self.pages.add(slabs)
        self.taken.update(slabs)
        if self.is_on_device:
            # A device gives memory with what was there, which may not even be numbers. Memory of this machine comes as zeros.
            # Never in a stream beside the engine's: one kernel there makes the gaps between all kernels of the engine's graphs longer, until
            # the process ends (0.45 instead of 0.10 us on an H200).
            page_bytes = self.memory.page_bytes
            with self.stream_lock, torch.cuda.stream(self.stream):
                for first, end in runs_of(pages):
                    self.buffer[first * page_bytes : end * page_bytes].zero_()
                zeroed = self.mark() if self.is_settled else None
            if zeroed is not None:
                zeroed.synchronize()
        return True

    def note_failure(self, error: Exception) -> None:
        if not self.has_warned:
            self.has_warned = True
            logger.warning("kvik: memory for KV could not be mapped: %s", error)

    def n_claimable(self) -> int:
        """For how many slabs there is memory now."""
        return max(0, self.memory.claimable_bytes - self.taken_bytes) // self.slab_bytes

    def give_back(self, slabs: Sequence[int]) -> None:
        """Gives back memory of slabs that are taken and that no step which begins later uses."""
        if slabs and self.is_on_device:
            # Steps that were begun may still read and write there.
            torch.cuda.synchronize(self.buffer.device)
        self.release(slabs)

    def release(self, slabs: Sequence[int]) -> None:
        """Gives back memory of slabs that are taken and that nothing uses any more."""
        if slabs:
            pages = self.pages.remove(slabs)
            self.taken.difference_update(slabs)
            self.memory.give_back(pages)

    # === Beside the engine ===

    @property
    def is_on_device(self) -> bool:
        return self.buffer.device.type == "cuda"

    def note_stream(self) -> None:
        """The engine begins its work in the stream that is current now."""
        if not self.is_on_device:
            return
        stream = torch.cuda.current_stream(self.buffer.device)
        if stream != self.stream:
            with self.stream_lock:
                if self.stream is not None:
                    # Behind the zeros of what was taken before.
                    stream.wait_stream(self.stream)
                self.stream = stream

    def mark(self) -> torch.cuda.Event | None:
        """A point in the engine's stream behind all that was begun; `None` where it works at once."""
        if not self.is_on_device:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """The mapper's thread does inside of it what it does with the device."""
        if not self.is_on_device:
            yield
            return
        # Engines allocate in inference mode, and such memory is written in it only.
        with torch.inference_mode(), torch.cuda.device(self.buffer.device):
            yield

    def interrupt(self) -> None:
        self.memory.interrupt()

    def note_starved(self) -> None:
        self.memory.note_starved()

    def stop_waiting(self) -> None:
        self.memory.stop_waiting()


def runs_of(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pages in rising order as runs, each by its first page and the one behind its last."""
    first = end = None
    for page in pages:
        if page != end:
            if first is not None:
                yield first, end
            first = page
        end = page + 1
    if first is not None:
        yield first, end


def pieces_of_layer(name: str, tensor: torch.Tensor, n_blocks: int, begin: int) -> list[Piece]:
    """Where the blocks of a layer lie in the memory that begins at `begin`.

    Blocks are the first dimension, or the second one behind keys and values. A kernel may have several of its own for each block.
    """
    shape, strides, item_bytes = tensor.shape, tensor.stride(), tensor.element_size()
    has_halves = tensor.dim() > 2 and shape[0] == 2 and shape[0] % n_blocks != 0 and shape[1] % n_blocks == 0
    axis = 1 if has_halves else 0
    if shape[axis] % n_blocks != 0:
        raise kvik.InvalidValueError(
            f"the KV of {name} has the shape {tuple(shape)}; allowed with `elastic`: {n_blocks} blocks, first or behind keys and values"
        )
    n_parts = shape[axis] // n_blocks
    inner = zip(shape[axis + 1 :], strides[axis + 1 :], strict=True)
    n_items = strides[axis] * (n_parts - 1) + 1 + sum((length - 1) * stride for length, stride in inner)
    stride_bytes = strides[axis] * n_parts * item_bytes
    if n_items * item_bytes > stride_bytes:
        raise kvik.InvalidValueError(
            f"the KV of {name} has the strides {strides}; allowed with `elastic`: a block is in one piece, or in one of keys and "
            "one of values"
        )
    halves = range(2 if has_halves else 1)
    offset = tensor.data_ptr() - begin
    return [Piece(offset + half * strides[0] * item_bytes, n_items * item_bytes, stride_bytes) for half in halves]
