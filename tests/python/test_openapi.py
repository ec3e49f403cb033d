"""What the published description allows, and what it does not, never breaks the gateway."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

EXAMPLES = 25
MAX_TOKENS = 4
OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/generate"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
]
# Any text is a good path: only requests with a body can be wrong.
REQUESTS = [
    (method, path, mode)
    for method, path in OPERATIONS
    for mode in GenerationMode
    if mode == GenerationMode.POSITIVE or method == "POST"
]


@pytest.fixture(scope="session")
def description(gateway: str):
    return schemathesis.openapi.from_url(f"{gateway}/openapi.json")


def aim(path: str, body) -> None:
    """Points a request at the model that is served, and keeps its output short.

    Most made-up requests would end at an unknown model and never reach a worker.
    """
    if not isinstance(body, dict):
        return
    body["model"] = "kvik-tiny"
    limits = body.setdefault("sampling", {}) if path == "/generate" else body
    if not isinstance(limits, dict):
        return
    for name in ("max_tokens", "max_completion_tokens"):
        limit = limits.get(name)
        if isinstance(limit, int) and MAX_TOKENS < limit:
            limits[name] = MAX_TOKENS
    if limits.get("max_tokens") is None and limits.get("max_completion_tokens") is None:
        limits["max_tokens"] = MAX_TOKENS


def test_every_operation_of_the_description_is_tested(description):
    described = {(method.upper(), path) for path in description for method in description[path]}
    assert described == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path", "mode"), REQUESTS)
def test_no_request_ends_in_a_server_error(description, gateway: str, method: str, path: str, mode: GenerationMode):
    operation = description[path][method]
    cases = operation.as_strategy(generation_mode=mode)

    # Fixed examples: a run that fails can be repeated.
    @given(case=cases)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def no_server_error(case):
        aim(path, case.body)
        # A client that gives no time is rightly answered with 504.
        case.headers.pop("x-request-timeout-ms", None)
        response = case.call(base_url=gateway, timeout=60)
        case.validate_response(response, checks=[not_a_server_error])

    no_server_error()
