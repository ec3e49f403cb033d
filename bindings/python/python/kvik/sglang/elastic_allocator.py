"""SGLang's allocators of KV pages, with memory taken before pages are given."""

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.utils import get_num_new_pages

from kvik.sglang.elastic_pages import ElasticPages
from kvik.sglang.elastic_pool import slab_memory_of


class ElasticAllocator:
    """What is different in an allocator whose pool has memory of kvik; one of another pool is as SGLang has it.

    Free pages without memory are not among its free ones. They come back before something is allocated, evicted or refused for
    the lack of pages.
    """

    # Memory that is kept for the prefix cache.
    cache_bytes = 0
    pages: ElasticPages | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        memory = slab_memory_of(self.get_kvcache())
        if memory is not None:
            self.pages = ElasticPages(self, memory, self.cache_bytes)

    def clear(self) -> None:
        super().clear()
        if self.pages is not None:
            self.pages.balloon.hide()

    def need(self, n_tokens: int) -> None:
        """Takes memory where fewer tokens are available."""
        if self.pages is not None and (n_missing := n_tokens - self.available_size()) > 0:
            self.pages.grow(n_missing)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        self.need(need_size)
        return super().alloc(need_size)

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        # Rather more memory than a smaller prefix cache.
        self.need(num_tokens)
        return super().evict_to_free_tokens(tree_cache, num_tokens)

    def max_new_tokens_for_memory(
        self, input_tokens: int, max_new_tokens: int, *, token_capacity: int, **other: Any
    ) -> int | None:
        """A request that would need more than may ever be held is refused, instead of waiting for it."""
        if self.pages is not None:
            token_capacity = min(token_capacity, self.pages.most_tokens)
            if input_tokens >= token_capacity:
                return None
        return super().max_new_tokens_for_memory(
            input_tokens, max_new_tokens, token_capacity=token_capacity, **other
        )

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> PrefillBudget:
        if self.pages is None:
            return super().create_prefill_budget(tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        return ElasticPrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)


class ElasticTokenAllocator(ElasticAllocator, TokenToKVPoolAllocator):
    """Pages of one token."""


class ElasticPagedAllocator(ElasticAllocator, PagedTokenToKVPoolAllocator):
    """Pages of several tokens."""

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        if self.pages is not None:
            n_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu)
            self.need(n_pages * self.page_size)
        return super().alloc_extend(prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, *args, **kwargs)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        if self.pages is not None:
            n_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
            self.need(n_pages * self.page_size)
        return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)


class ElasticPrefillBudget(PrefillBudget):
    """Admits requests by the memory that could be taken, and takes what they compute in this step before they are admitted.

    Answers of requests take memory as they grow. Where there is none then, SGLang retracts requests, as it does without kvik.
    """

    def __init__(self, allocator: ElasticAllocator, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> None:
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self.claimable_tokens = allocator.pages.claimable_tokens

    def _available_and_evictable(self) -> int:
        return self.present_tokens() + self.claimable_tokens

    def present_tokens(self) -> int:
        return super()._available_and_evictable()

    def secure(self, n_tokens: int) -> bool:
        """Takes memory for so many tokens beside those of requests that were admitted; says whether they are there."""
        n_missing = self.current_offset + n_tokens - self.present_tokens()
        if n_missing > 0:
            self.allocator.pages.grow(n_missing)
            self.claimable_tokens = self.allocator.pages.claimable_tokens
        return self.current_offset + n_tokens <= self.present_tokens()

    def has_capacity(self) -> bool:
        if not super().has_capacity():
            self.secure(self.page_size)
        if super().has_capacity():
            return True
        self.allocator.pages.note_short()
        return False

    def check_prefill(
        self, *, extend_input_len: int, total_tokens: int, chunk_limit: int | None, **other: Any
    ) -> tuple[bool, int | None]:
        n_tokens = extend_input_len if chunk_limit is None else min(extend_input_len, chunk_limit)
        is_there = self.secure(self.ceil_paged_tokens(n_tokens) + self.page_size)
        if self.total_offset == 0 and total_tokens >= self.remaining_total:
            # Nothing runs that would free memory, so all of it must come from others.
            self.secure(total_tokens + 1)
        can_admit, limit = super().check_prefill(
            extend_input_len=extend_input_len, total_tokens=total_tokens, chunk_limit=chunk_limit, **other
        )
        if is_there and can_admit:
            return True, limit
        self.allocator.pages.note_short()
        return False, None

    def can_allocate_prefill(self, *, paged_input: int, **other: Any) -> bool:
        if self.secure(paged_input) and super().can_allocate_prefill(paged_input=paged_input, **other):
            return True
        self.allocator.pages.note_short()
        return False

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """The next part of a long prompt is as long as there is memory for it; without any it waits."""
        self.secure(self.ceil_paged_tokens(chunk_limit) + self.page_size)
        n_present = self.present_tokens() - self.current_offset - self.page_size
        n_tokens = min(chunk_limit, n_present // self.page_size * self.page_size)
        return n_tokens if n_tokens > 0 else None
