"""What of a sequence is there in all of an engine's pools, such as attention and state-space layers."""

from collections.abc import Mapping

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult

from kvik.sglang.pages import Pages


def found_in_pools(
    keys: list[str], n_found: int, transfers: list[PoolTransfer], pools: Mapping[str, Pages]
) -> PoolTransferResult:
    """The lengths at which a sequence can go on: all its pages are in the first pool, and the others have what they need.

    A pool that needs all pages needs them up to there; one that needs the last pages, as many as the transfer names,
    needs those before it.
    """
    usable = set(range(1, n_found + 1))
    n_of_pools: dict[str, int] = {PoolName.KV: n_found} if n_found else {}
    for transfer in transfers:
        if not usable:
            break
        pages = pools.get(str(transfer.name))
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            n_of_pool = 0 if pages is None else pages.n_found(keys[:n_found])
            of_pool = set(range(1, n_of_pool + 1))
        elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            found = [False] * n_found if pages is None else pages.are_found(keys[:n_found])
            of_pool = ends_of_runs(found, max(1, len(transfer.keys or [])))
        else:
            # It has no say in how much of the sequence is used.
            continue
        if of_pool:
            n_of_pools[transfer.name] = max(of_pool)
        usable &= of_pool
    return PoolTransferResult(max(usable, default=0), n_of_pools, sorted(usable))


def ends_of_runs(found: list[bool], n_needed: int) -> set[int]:
    """The lengths whose last `n_needed` pages are there, or all of them where they are fewer."""
    ends, n_run = set(), 0
    for n_pages, is_found in enumerate(found, start=1):
        n_run = n_run + 1 if is_found else 0
        if n_run >= min(n_needed, n_pages):
            ends.add(n_pages)
    return ends
