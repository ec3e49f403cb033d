"""The published description is what the gateway does.

What it allows is answered, what it does not allow is refused, and neither breaks the gateway.
"""

import struct
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.core.parameters import ParameterLocation

MODEL = "kvik-tiny"
VOCABULARY = 4096
EXAMPLES = 30
# Fewer answers than this and a test has looked at next to nothing.
MIN_ANSWERS = 10
# By field: the most that is asked for here, and the most that is allowed.
LIMITS = {"max_tokens": (4, 2**32 - 1), "max_completion_tokens": (4, 2**32 - 1), "n": (2, 128)}
GENERATION = ["/v1/completions", "/v1/chat/completions", "/generate"]
WITH_BODY = [*GENERATION, "/tokenize", "/detokenize", "/v1/score", "/index/prompt", "/index/holders"]
WITHOUT_BODY = [
    "/v1/models",
    "/v1/models/{model}",
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
    "/index/stats",
    "/index/blocks",
]
# Its body is a request of another path, and those are made up for these paths.
EXPLAIN = "/route/explain"
# They depend on each other.
STEPPED = ["/inference/init", "/inference/step", "/inference/finish"]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


@pytest.fixture(scope="session")
def description(gateway: str):
    loaded = schemathesis.openapi.from_url(f"{gateway}/openapi.json")
    # Streams are read to their end.
    loaded.config.max_stream_events = 10_000
    return loaded


def examples(operation, mode: GenerationMode):
    """Runs a function on requests that the description allows, or on some that it does not."""

    def decorate(function):
        # Fixed examples: a run that fails can be repeated.
        given(case=operation.as_strategy(generation_mode=mode))(
            settings(
                max_examples=EXAMPLES,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )(function)
        )()

    return decorate


def answer(case, gateway: str):
    # A client that gives no time is rightly answered with 504.
    case.headers.pop("x-request-timeout-ms", None)
    response = case.call(base_url=gateway, timeout=60)
    case.validate_response(response, checks=CHECKS)
    # A stream is described in prose: its schema would be that of one string.
    if response.headers["content-type"][0] != "text/event-stream":
        case.validate_response(response, checks=[response_schema_conformance])
    return response


def whole(value):
    """The value with its whole numbers written as such: in a schema 3.0 is an integer too."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**64:
        return int(value)
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, dict):
        return {name: whole(item) for name, item in value.items()}
    return value


def single_precision(value):
    """The value with its numbers as the gateway reads them: a tiny excess over a bound is none."""
    if isinstance(value, float) and abs(value) < 1e38:
        return struct.unpack("f", struct.pack("f", value))[0]
    if isinstance(value, list):
        return [single_precision(item) for item in value]
    if isinstance(value, dict):
        return {name: single_precision(item) for name, item in value.items()}
    return value


def known(tokens):
    """The value with its tokens in the model's vocabulary."""
    if isinstance(tokens, list):
        return [known(token) for token in tokens]
    return tokens % VOCABULARY if isinstance(tokens, int) else tokens


def shorten(path: str, body: dict) -> None:
    """Keeps the outputs of a request few and short; what is wrong with it stays wrong."""
    sampling = body.get("sampling")
    places = [body, sampling] if isinstance(sampling, dict) else [body]
    for place in places:
        for name, (most, allowed) in LIMITS.items():
            value = place.get(name)
            if isinstance(value, int) and most < value <= allowed:
                place[name] = most
    has_limit = any(place.get(name) is not None for place in places for name in ("max_tokens", "max_completion_tokens"))
    if path in GENERATION and not has_limit:
        body["max_tokens"] = LIMITS["max_tokens"][0]


def aim(path: str, body: dict) -> dict:
    """Makes a request that the description allows one that the bundled model can serve.

    That takes the model's name and vocabulary, and the rules between fields, which are prose.
    """
    body = whole(body)
    if path == "/index/holders":
        # Chunks have names of their own, whatever the model.
        return body
    shorten(path, body)
    body["model"] = MODEL
    for name in ("prompt", "token_ids", "tokens"):
        if name in body:
            body[name] = known(body[name])
    for name in body.get("sampling", {}).keys() & body.keys():
        del body[name]
    if body.get("best_of"):
        body["best_of"] = body.get("n") or 1
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if body.get("logprobs") is not None:
        body.pop("echo", None)
    if isinstance(body.get("prompt"), list):
        body.pop("seq_id", None)
    if path in GENERATION:
        body.pop("add_special_tokens", None)
    if path in ("/v1/score", "/index/prompt"):
        # Exactly one form of a prompt; what a conversation looks like is the chat route's to say.
        body.pop("messages", None)
        if body.get("token_ids") is None and body.get("prompt") is None:
            body["prompt"] = "Once upon a time"
        if body.get("token_ids") is not None:
            body.pop("prompt", None)
    return body


def test_every_operation_of_the_description_is_tested(description):
    described = {(method.upper(), path) for path in description for method in description[path]}
    tested = {("POST", path) for path in WITH_BODY} | {("GET", path) for path in WITHOUT_BODY}
    assert described == tested | {("POST", path) for path in [EXPLAIN, *STEPPED]}


def test_a_sequence_is_stepped_as_described(description, gateway: str):
    def ask(path: str, body: dict):
        return answer(description[path]["POST"].Case(body=body, media_type="application/json"), gateway)

    name = {"seq_id": "stepped"}
    begun = ask("/inference/init", {**name, "prompt": "Once upon a time", "ignore_eos": True, "temperature": 0})
    assert begun.status_code == 200, begun.text
    first, second = ask("/inference/step", name), ask("/inference/step", {**name, "n": 3})
    assert (first.status_code, second.status_code) == (200, 200), second.text
    assert first.json()["tokens"] == [first.json()["token"]]
    again = ask("/inference/step", {**name, "n": 3, "step_index": second.json()["step_index"]})
    assert again.json() == second.json()
    assert ask("/inference/finish", name).status_code == 200
    assert ask("/inference/step", name).status_code == 404
    refused = ask("/inference/step", {"seq_id": "stepped", "n": 0})
    assert refused.status_code == 400, refused.text


def test_a_route_is_explained_as_described(description, gateway: str):
    operation = description[EXPLAIN]["POST"]
    bodies = [
        {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4},
        {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]},
    ]
    for body in bodies:
        case = operation.Case(body=body, media_type="application/json")
        response = answer(case, gateway)
        assert response.status_code == 200, response.text
        assert response.json()["worker"] is not None
    refused = answer(operation.Case(body={"model": "no such model"}, media_type="application/json"), gateway)
    assert refused.status_code == 404, refused.text


@pytest.mark.parametrize("path", WITH_BODY)
def test_what_the_description_allows_is_answered(description, gateway: str, path: str):
    n_answers = 0

    @examples(description[path]["POST"], GenerationMode.POSITIVE)
    def run(case):
        nonlocal n_answers
        case.body = aim(path, case.body)
        response = answer(case, gateway)
        assert response.status_code == 200, (case.body, response.text)
        if path in GENERATION:
            # Outputs have been made, to their end: a stream that fails has no last mark.
            is_stream = path == "/generate" or case.body.get("stream")
            assert response.text.endswith("data: [DONE]\n\n") if is_stream else response.json()["choices"]
        n_answers += 1

    assert MIN_ANSWERS <= n_answers


@pytest.mark.parametrize("path", WITH_BODY)
def test_what_the_description_does_not_allow_is_refused(description, gateway: str, path: str):
    statuses: Counter[int] = Counter()

    @examples(description[path]["POST"], GenerationMode.NEGATIVE)
    def run(case):
        if isinstance(case.body, dict):
            body = single_precision(case.body)
            shorten(path, body)
            # An unknown model is refused before anything else is looked at.
            if isinstance(body.get("model"), str | None):
                body["model"] = MODEL
            case.body = body
        # Headers have no wrong values: what cannot be used is passed over.
        if not case.meta.is_negative_at(ParameterLocation.BODY):
            return
        response = answer(case, gateway)
        assert 400 <= response.status_code < 500, (case.body, response.text)
        statuses[response.status_code] += 1

    assert MIN_ANSWERS <= statuses.total()
    assert MIN_ANSWERS <= statuses[400]


@pytest.mark.parametrize("path", WITHOUT_BODY)
def test_no_path_breaks_the_gateway(description, gateway: str, path: str):
    @examples(description[path]["GET"], GenerationMode.POSITIVE)
    def run(case):
        answer(case, gateway)
