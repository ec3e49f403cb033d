"""The interface for vLLM and programs like it."""
