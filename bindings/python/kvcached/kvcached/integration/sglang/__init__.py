"""The interface for SGLang and programs like it."""
