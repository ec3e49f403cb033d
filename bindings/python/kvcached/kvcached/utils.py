"""Settings from the environment, under kvcached's names. They are read once, when this is imported."""

import logging
import os
import re
import sys

from kvcached.errors import KVCachedConfigError, KVCachePoolExhausted
from kvcached.kv_geometry import MIB

__all__ = ["KVCachePoolExhausted", "KVCachedConfigError"]

SHM_DIR = "/dev/shm"
MAX_NAME_LENGTH = 64


def is_true(name: str, default: bool) -> bool:
    return os.environ.get(name, str(default)).strip().lower() in ("1", "true")


def _sanitize_segment(segment: str) -> str:
    """A name of letters, digits, `_` and `-`; whatever else there is becomes `_`."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", segment)[:MAX_NAME_LENGTH]


def _ipc_segment_exists(name: str) -> bool:
    return os.path.exists(os.path.join(SHM_DIR, name))


def _detect_engine_tag() -> str:
    program = " ".join(sys.argv[:2]).lower()
    if "vllm" in program:
        return "vLLM"
    return "SGLang" if "sglang" in program else "proc"


def _obtain_default_ipc_name() -> str:
    """`KVCACHED_IPC_NAME` as it is, or the first name of this process group that no file has."""
    if given := os.environ.get("KVCACHED_IPC_NAME"):
        return _sanitize_segment(given)
    base = f"kvcached_{_detect_engine_tag()}_{os.getpgrp()}"
    names = [base, *(f"{base}_{number}" for number in range(1, 100))]
    return next((name for name in names if not _ipc_segment_exists(name)), f"{base}_{os.getpid()}")


def _get_page_size() -> int:
    text = os.environ.get("KVCACHED_PAGE_SIZE_MB", "2")
    if not text.isdecimal() or int(text) == 0 or int(text) % 2 != 0:
        raise ValueError(f"`KVCACHED_PAGE_SIZE_MB` is {text}; allowed: multiples of 2")
    return int(text) * MIB


PAGE_SIZE = _get_page_size()
GPU_UTILIZATION = float(os.environ.get("KVCACHED_GPU_UTILIZATION", "0.95"))
PAGE_PREALLOC_ENABLED = is_true("KVCACHED_PAGE_PREALLOC_ENABLED", True)
MIN_RESERVED_PAGES = int(os.environ.get("KVCACHED_MIN_RESERVED_PAGES", "5"))
MAX_RESERVED_PAGES = int(os.environ.get("KVCACHED_MAX_RESERVED_PAGES", "10"))
MAX_CACHED_BLOCKS = int(os.environ.get("KVCACHED_MAX_CACHED_BLOCKS", "1000"))
MAX_CACHED_TOKENS = int(os.environ.get("KVCACHED_MAX_CACHED_TOKENS", "16000"))
SANITY_CHECK = is_true("KVCACHED_SANITY_CHECK", False)
CONTIGUOUS_LAYOUT = is_true("KVCACHED_CONTIGUOUS_LAYOUT", True)
DEFAULT_IPC_NAME = _obtain_default_ipc_name()


def align_to(x: int, a: int) -> int:
    """`x` rounded up to a multiple of `a`."""
    return -(-x // a) * a


def align_up_to_page(n_cells: int, cell_size: int) -> int:
    """`n_cells` rounded up to what whole pages hold."""
    return align_to(n_cells, PAGE_SIZE // cell_size)


def get_log_level() -> int:
    level = logging.getLevelName(os.environ.get("KVCACHED_LOG_LEVEL", "INFO").upper())
    return level if isinstance(level, int) else logging.INFO


def get_kvcached_logger(name: str = "kvcached") -> logging.Logger:
    logger = logging.getLogger(name)
    logger.setLevel(get_log_level())
    return logger
