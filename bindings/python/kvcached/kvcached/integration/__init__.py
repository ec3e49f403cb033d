"""Interfaces for engines."""

SUPPORTED_ATTENTION_TYPES = ("MHA", "GQA", "MLA")
# Behind the axis of tokens: heads, then the values of a head.
SUPPORTED_KV_LAYOUTS = ("NHD",)
