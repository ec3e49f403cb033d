"""What the published description allows, and what it does not, never breaks the gateway."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

EXAMPLES = 25
schema = schemathesis.pytest.from_fixture("description")


@pytest.fixture(scope="session")
def description(gateway: str):
    return schemathesis.openapi.from_url(f"{gateway}/openapi.json")


# Fixed examples: a run that fails can be repeated.
@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_ends_in_a_server_error(case, gateway: str):
    response = case.call(base_url=gateway, timeout=60)
    case.validate_response(response, checks=[not_a_server_error])
