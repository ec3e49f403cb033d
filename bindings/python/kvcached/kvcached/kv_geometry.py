"""Which blocks fit on which pages."""

import math

MIB = 1 << 20
PAGE_GRANULARITY = 2 * MIB
# A block is made at most so many times as large to fit.
MAX_BLOCK_GROWTH = 2
# Pages that are recommended, at most.
MAX_PAGE_MB = 64


def has_zero_capacity_pages(block_mem_size: int, page_size: int) -> bool:
    """Whether some page has no whole block on it.

    Blocks lie side by side, and begin on a page wherever multiples of their greatest common divisor do. The worst page begins one
    such step behind the start of a block, and must still have all of the next one.
    """
    return page_size < 2 * block_mem_size - math.gcd(page_size, block_mem_size)


def aligned_block_size(block_size: int, bytes_per_token: int, page_size: int) -> int | None:
    """The smallest block of at least `block_size` tokens that divides a page; `None` where there is none of twice the size.

    It is a multiple of the largest power of two in `block_size`, which kernels rely on.
    """
    step = block_size & -block_size
    for size in range(block_size, block_size * MAX_BLOCK_GROWTH + 1, step):
        if page_size % (size * bytes_per_token) == 0:
            return size
    return None


def recommend_page_geometry(block_size: int, bytes_per_token: int) -> tuple[int, int] | None:
    """The smallest page in MiB, with its block in tokens, that blocks divide."""
    for page_mb in range(2, MAX_PAGE_MB + 1, 2):
        size = aligned_block_size(block_size, bytes_per_token, page_mb * MIB)
        if size is not None:
            return page_mb, size
    return None


def check_page_geometry(block_mem_size: int, page_size: int, block_size: int | None = None) -> str | None:
    """What is wrong with blocks of these bytes on these pages, and what would be right; `None` where nothing is."""
    if not has_zero_capacity_pages(block_mem_size, page_size):
        return None
    if block_mem_size > page_size:
        problem = f"a block of {block_mem_size} bytes is larger than the page of {page_size} bytes"
    else:
        problem = f"a block of {block_mem_size} bytes does not tile the page of {page_size} bytes: some pages would have none"
    return f"{problem}. Start with {advice(block_mem_size, page_size, block_size)}"


def advice(block_mem_size: int, page_size: int, block_size: int | None) -> str:
    if block_size is not None and block_mem_size % block_size == 0:
        bytes_per_token = block_mem_size // block_size
        size = aligned_block_size(block_size, bytes_per_token, page_size)
        if size is not None:
            return f"--block-size {size}"
        if (best := recommend_page_geometry(block_size, bytes_per_token)) is not None:
            return f"KVCACHED_PAGE_SIZE_MB={best[0]} with --block-size {best[1]}"
    page_mb = 2
    while has_zero_capacity_pages(block_mem_size, page_mb * MIB):
        page_mb += 2
    return f"KVCACHED_PAGE_SIZE_MB={page_mb}"
