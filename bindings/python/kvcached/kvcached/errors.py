"""Exceptions that callers of kvcached know by name."""


class KVCachedConfigError(RuntimeError):
    """A setting or a shape that is not allowed."""


class KVCachePoolExhausted(ValueError):
    """There is not enough memory for so many blocks."""


class MapQuarantinedError(RuntimeError):
    """Memory could not be mapped and is in an unknown state."""


class StateConsistencyError(RuntimeError):
    """The books of blocks and of pages differ."""


class QuarantinedResizeError(ValueError):
    """A limit that cannot be set while memory is in an unknown state."""
