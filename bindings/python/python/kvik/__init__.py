"""One store for the KV cache of the engines of a node.

    import kvik

    with kvik.Store.attach("/run/kvik/store.sock", model="llama", layout="mine", dtype="bf16", n_layers=32,
                           token_layer_bytes=4096, block_tokens=16) as store:
        chain = store.chain(tokens)
        found = store.lookup(chain)

`kvik.vllm` is the connector for vLLM, `kvik.sglang` the storage backend for SGLang. Importing `kvik` takes a few milliseconds and imports no engine and no torch.
"""

from kvik._kvik import (
    Chain,
    Client,
    EngineMemory,
    Found,
    Index,
    InvalidValueError,
    Job,
    KvikError,
    LoadPlanner,
    MeasuredLoad,
    Memory,
    MemoryTensor,
    PagedMemory,
    Prefetch,
    RefusedError,
    Store,
    StoreGoneError,
    WorkerMatch,
    __version__,
)

__all__ = [
    "Chain",
    "Client",
    "EngineMemory",
    "Found",
    "Index",
    "InvalidValueError",
    "Job",
    "KvikError",
    "LoadPlanner",
    "MeasuredLoad",
    "Memory",
    "MemoryTensor",
    "PagedMemory",
    "Prefetch",
    "RefusedError",
    "Store",
    "StoreGoneError",
    "WorkerMatch",
    "__version__",
]
