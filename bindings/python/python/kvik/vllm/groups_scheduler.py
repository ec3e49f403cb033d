"""The scheduler's half for a model with several groups of KV."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.logger import init_logger

import kvik
from kvik.group_lookup import GroupsFound, GroupsLookup
from kvik.planner import GroupsPlanner
from kvik.vllm.groups import Group, GroupStores, keys_of
from kvik.vllm.metadata import GroupLoad, GroupSave, GroupsLoadOrder, GroupsSaveOrder, KvikMetadata
from kvik.vllm.scheduler import SchedulerHalf, Tracked
from kvik.vllm.settings import Settings
from kvik.windows import BlockReaders

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")


@dataclass
class GroupsTracked(Tracked):
    """A request, with what it has in each group."""

    # The blocks of each group from the start of the sequence on, with 0 for those that it never had.
    tables: list[list[int]] = field(default_factory=list)
    # What names the chunks of its chain.
    keys: list[bytes] = field(default_factory=list)
    # The chain that the keys are of, and the length of chunks.
    keyed: tuple[kvik.Chain | None, int] = (None, 0)
    # Whether a load of it failed.
    has_failed: bool = False

    def chunk_keys(self, chunk_tokens: int) -> list[bytes]:
        chain, keyed_tokens = self.keyed
        if chain is not self.chain or keyed_tokens != chunk_tokens:
            self.keyed = self.chain, chunk_tokens
            self.keys = [] if self.chain is None else keys_of(self.chain, chunk_tokens)
        return self.keys


class GroupsScheduler(SchedulerHalf):
    """Answers, loads and saves for all groups of a request together.

    A request goes on behind a prefix of whole chunks that all groups can serve. Blocks of windows leave a request while it is
    computed, so they are saved after the step that computes the last token of their chunk, also those of answers; and where
    such a block is given to others, the save of it is waited for.
    """

    tracked_type = GroupsTracked

    def __init__(
        self, stores: GroupStores, settings: Settings, groups: Sequence[Group], planner: GroupsPlanner | None = None
    ) -> None:
        super().__init__(stores.first, settings, groups[0].geometry, planner)
        self.stores = stores
        self.windows = [group.window for group in groups]
        self.readers = BlockReaders()
        self.group_loads: list[GroupsLoadOrder] = []
        self.group_saves: list[GroupsSaveOrder] = []
        self.overtaken: set[int] = set()
        self.n_save_orders = 0

    def start_lookup(
        self, tracked: GroupsTracked, part_of: GroupsFound | None = None, n_most_tokens: int | None = None
    ) -> GroupsLookup:
        chunk_tokens = self.stores.chunk_tokens
        if chunk_tokens is None:
            raise kvik.StoreGoneError("a group has no session with a daemon")
        return GroupsLookup(
            self.stores,
            tracked.chunk_keys(chunk_tokens),
            self.windows,
            chunk_tokens,
            tracked.request.num_tokens,
            asks_for_memory=self.planner is not None,
            part_of=part_of,
            n_most_tokens=n_most_tokens,
        )

    def tokens_to_load(self, tracked: GroupsTracked, n_computed_tokens: int) -> int | None:
        """As of one group. Where a part of what was found is to be loaded, windows may be missing behind it, and the store is
        asked again."""
        found, part_of = tracked.found, tracked.lookup.part_of
        if part_of is not None:
            # What could go on behind it, and is more than memory gives.
            tracked.found = part_of
            return max(found.n_tokens, part_of.n_memory_tokens)
        n_tokens = self.planner.tokens_to_load(found, n_computed_tokens)
        if n_tokens <= n_computed_tokens or n_tokens in (found.n_tokens, found.n_memory_tokens):
            return n_tokens
        try:
            tracked.lookup = self.start_lookup(tracked, found, n_tokens)
        except kvik.StoreGoneError:
            return found.n_memory_tokens
        return None

    def matched_tokens(self, request: "Request", n_computed_tokens: int) -> tuple[int | None, bool]:
        tracked = self.track(request)
        if tracked.has_failed:
            # It is computed: what failed once may fail again.
            tracked.n_stored_tokens = 0
            return 0, False
        return super().matched_tokens(request, n_computed_tokens)

    def after_alloc(self, request: "Request", blocks: "KVCacheBlocks", n_external_tokens: int) -> None:
        """Notes the blocks that are to be loaded, which are those that the engine did not have and needs."""
        tracked = self.track(request)
        tracked.tables = [list(table) for table in blocks.get_block_ids()]
        end_token = tracked.n_local_tokens + n_external_tokens
        self.begin_measured_load(tracked, end_token)
        if n_external_tokens == 0 or tracked.chain is None:
            return
        parts = []
        for group, (window, table) in enumerate(zip(self.windows, tracked.tables, strict=True)):
            first = max(tracked.n_local_tokens // window.block_tokens, window.first_block(end_token))
            end = end_token // window.block_tokens
            if first < end:
                block_ids = table[first:end]
                block_ids += [0] * (end - first - len(block_ids))
                self.overtaken |= self.readers.take(block_ids)
                parts.append(self.load(tracked, group, first, block_ids))
        self.group_loads.append(GroupsLoadOrder(request.request_id, parts))

    def load(self, tracked: GroupsTracked, group: int, first_block: int, block_ids: list[int]) -> GroupLoad:
        block_tokens = self.windows[group].block_tokens
        chunk_tokens = self.stores.chunk_tokens
        end_token = (first_block + len(block_ids)) * block_tokens
        # Without a daemon the order is given all the same, and the worker reports that nothing came. So it is where the
        # engine has no block for what it needs.
        packed, first_chunk = b"", 0
        if chunk_tokens is not None and 0 not in block_ids:
            first_chunk = 0 if self.windows[group].is_full else first_block * block_tokens // chunk_tokens
            keys = tracked.chunk_keys(chunk_tokens)[first_chunk : end_token // chunk_tokens]
            packed = self.packed(group, keys, chunk_tokens)
        first_of_chain = first_chunk * (chunk_tokens or 0) // block_tokens
        return GroupLoad(group, packed, first_block - first_of_chain, block_ids)

    def packed(self, group: int, keys: Sequence[bytes], chunk_tokens: int) -> bytes:
        try:
            return self.stores.part(group, keys, chunk_tokens).pack(len(keys))
        except kvik.StoreGoneError:
            return b""

    def metadata(self, output: "SchedulerOutput") -> KvikMetadata:
        """The orders of this step."""
        chunk_tokens = self.stores.chunk_tokens
        for new in output.scheduled_new_reqs:
            if (tracked := self.tracked.get(new.req_id)) is not None:
                self.replace_tables(tracked, new.block_ids, new.num_computed_tokens)
                n_scheduled_tokens = output.num_scheduled_tokens[new.req_id]
                self.save_computed(tracked, new.num_computed_tokens, n_scheduled_tokens, chunk_tokens)
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, new_block_ids, n_computed_tokens in rows:
            if (tracked := self.tracked.get(request_id)) is None:
                continue
            if new_block_ids is not None:
                if request_id in cached.resumed_req_ids:
                    self.replace_tables(tracked, new_block_ids, n_computed_tokens)
                else:
                    for table, block_ids in zip(tracked.tables, new_block_ids, strict=True):
                        table.extend(block_ids)
                        self.overtaken |= self.readers.take(block_ids)
            self.save_computed(tracked, n_computed_tokens, output.num_scheduled_tokens[request_id], chunk_tokens)
        if self.planner is not None:
            self.planner.step_began(output)
        preempted = set(output.preempted_req_ids or ())
        orders = KvikMetadata(
            preempted=preempted, group_loads=self.group_loads, group_saves=self.group_saves, overtaken=self.overtaken
        )
        self.group_loads, self.group_saves, self.overtaken = [], [], set()
        return orders

    def replace_tables(
        self, tracked: GroupsTracked, tables: Sequence[Sequence[int]], n_computed_tokens: int
    ) -> None:
        """Takes the blocks of a request that begins or goes on; those of computed tokens are not written."""
        tracked.tables = [list(table) for table in tables]
        for window, table in zip(self.windows, tracked.tables, strict=True):
            self.overtaken |= self.readers.take(table[n_computed_tokens // window.block_tokens :])

    def save_computed(
        self, tracked: GroupsTracked, n_computed_tokens: int, n_scheduled_tokens: int, chunk_tokens: int | None
    ) -> None:
        """Saves chunks whose last token is computed in this step."""
        # Tokens that are not known yet, or may be rejected, have no name.
        n_tokens = min(n_computed_tokens + n_scheduled_tokens, tracked.request.num_tokens)
        self.save_chunks(tracked, n_computed_tokens, n_tokens, chunk_tokens)

    def save_chunks(
        self, tracked: GroupsTracked, n_computed_tokens: int, n_tokens: int, chunk_tokens: int | None
    ) -> None:
        """Saves the chunks of the first `n_tokens` for which no order was given; before this step `n_computed_tokens` had
        been computed."""
        request, controls = tracked.request, tracked.controls
        if self.settings.save == "prompts":
            n_tokens = min(n_tokens, request.num_prompt_tokens)
        if self.settings.save == "nothing" or controls.skip_save or chunk_tokens is None:
            return
        first, end = tracked.n_stored_tokens // chunk_tokens, n_tokens // chunk_tokens
        if end <= first:
            return
        if tracked.chain is None:
            tracked.chain = self.chain(tracked, request.num_tokens)
        elif tracked.chain.n_tokens < end * chunk_tokens:
            tracked.chain = self.chain(tracked, request.num_tokens, after=tracked.chain)
        if len(tracked.chunk_keys(chunk_tokens)) < end:
            return
        chunks = range(first, end)
        parts = []
        for group in range(len(self.windows)):
            part = self.part(tracked, group, chunks, chunk_tokens, n_computed_tokens)
            if part is not None:
                parts.append(part)
        tracked.n_stored_tokens = end * chunk_tokens
        if not parts:
            return
        self.n_save_orders += 1
        order = GroupsSaveOrder(request.request_id, self.n_save_orders, parts)
        order.pin_s, order.ttl_s, order.priority = controls.pin_s, controls.ttl_s, controls.priority
        for part in parts:
            # All of them: where the first chunks are gone meanwhile, they are saved again.
            self.readers.note(order.number, part.block_ids)
        self.group_saves.append(order)
        tracked.has_saves = True

    def part(
        self, tracked: GroupsTracked, group: int, chunks: range, chunk_tokens: int, n_computed_tokens: int
    ) -> GroupSave | None:
        """What is saved of some chunks in one group."""
        window, table, keys = self.windows[group], tracked.tables[group], tracked.chunk_keys(chunk_tokens)
        if window.is_full:
            chunk_blocks = chunk_tokens // window.block_tokens
            block_ids = table[: chunks.stop * chunk_blocks]
            if len(block_ids) < chunks.stop * chunk_blocks:
                return None
            packed, first_block = self.packed(group, keys[: chunks.stop], chunk_tokens), chunks.start * chunk_blocks
        else:
            saved = [
                (keys[chunk], blocks)
                for chunk in chunks
                if (blocks := window.blocks_to_save(table, chunk, chunk_tokens, n_computed_tokens)) is not None
            ]
            block_ids = [block for _, blocks in saved for block in blocks]
            packed, first_block = self.packed(group, [key for key, _ in saved], chunk_tokens), 0
        return GroupSave(group, packed, first_block, block_ids) if packed and block_ids else None

    def finished_groups(self, request: "Request", tables: tuple[list[int], ...]) -> bool:
        """Saves what is left of a request that ended; says whether its blocks are still read."""
        tracked = self.tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        if self.planner is not None:
            self.planner.forget(request.request_id)
        # The last token was sampled and never computed.
        n_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        tracked.tables = [list(table) for table in tables]
        self.save_chunks(tracked, request.num_computed_tokens, n_tokens, self.stores.chunk_tokens)
        self.note_groups(tracked)
        return tracked.has_saves

    def note_groups(self, tracked: GroupsTracked) -> None:
        """Tells the eviction policies of a request that has ended, by a group that has all of it where there is one."""
        chunk_tokens = self.stores.chunk_tokens
        if chunk_tokens is None or not (keys := tracked.chunk_keys(chunk_tokens)):
            return
        full = next((group for group, window in enumerate(self.windows) if window.is_full), 0)
        try:
            part = self.stores.part(full, keys, chunk_tokens)
            self.stores.stores[full].note_request(part, tracked.request.num_output_tokens)
        except kvik.StoreGoneError:
            logger.debug("there is no store")

    def reported(self, output: "KVConnectorOutput") -> None:
        """Notes the requests whose load failed; the engine frees their blocks, and asks again."""
        if self.planner is not None:
            self.planner.step_ended()
            for request_id in output.finished_recving or ():
                self.planner.loads_ended([request_id], is_whole=request_id not in output.failed_recving)
        for request_id in output.failed_recving:
            if (tracked := self.tracked.get(request_id)) is not None:
                tracked.has_failed = True
