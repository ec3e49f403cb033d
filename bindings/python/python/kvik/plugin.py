"""What other programs load by their entry points."""

import os


def register_in_sglang() -> None:
    """The plugin of SGLang's group `sglang.srt.plugins`: does nothing without `KVIK_SGLANG_ELASTIC`, and imports nothing then.

    SGLang goes on without a plugin that raises. Wrong settings end the process instead.
    """
    text = os.environ.get("KVIK_SGLANG_ELASTIC")
    if text is None:
        return
    import kvik
    from kvik.sglang.elastic_settings import ElasticSettings

    try:
        settings = ElasticSettings.read(text)
    except kvik.InvalidValueError as error:
        raise SystemExit(f"kvik: {error}") from error
    from kvik.sglang.elastic_hooks import register

    register(settings)
