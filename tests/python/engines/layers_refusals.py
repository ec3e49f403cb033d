"""Which engines can load inside of a step, and which settings are refused, one line of JSON."""

import json
from types import SimpleNamespace

import kvik
from kvik.vllm.layers import obstacle
from kvik.vllm.settings import Settings


def engine_answer(settings: Settings, has_groups: bool = False, **change: object) -> str | None:
    engine = {"device_type": "cpu", "async_scheduling": False, "pipeline_parallel_size": 1, "speculative_config": None} | change
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=engine["device_type"]),
        scheduler_config=SimpleNamespace(async_scheduling=engine["async_scheduling"]),
        parallel_config=SimpleNamespace(pipeline_parallel_size=engine["pipeline_parallel_size"]),
        speculative_config=engine["speculative_config"],
        max_concurrent_batches=engine["pipeline_parallel_size"],
    )
    return obstacle(config, settings, has_groups)


def answer(settings: Settings, **change: object) -> str | None:
    try:
        return engine_answer(settings, **change)
    except kvik.InvalidValueError as error:
        return str(error)


def refusal(**extra: object) -> str:
    try:
        Settings.read(extra)
    except kvik.InvalidValueError as error:
        return str(error)
    return "taken"


plain = Settings()
answers = {
    "plain": answer(plain),
    "always": answer(Settings(layerwise="always"), async_scheduling=True),
    "never": answer(Settings(layerwise="never")),
    "device": answer(plain, device_type="cuda"),
    "ahead": answer(plain, async_scheduling=True),
    "stages": answer(plain, pipeline_parallel_size=2),
    "draft": answer(plain, speculative_config=object()),
    "groups": answer(plain, has_groups=True),
    "elastic": answer(Settings(elastic=True)),
    "wrong": refusal(layerwise="sometimes"),
    "right": [refusal(layerwise=name) for name in ("auto", "always", "never")],
}
print(json.dumps(answers), flush=True)
