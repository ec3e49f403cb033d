"""A real API server takes every object: `./check --kubernetes` runs this, with kube-apiserver and etcd on the path."""

import pathlib
from collections.abc import Iterator

import api_server
import pytest
import yaml
from api_server import ApiServer, running_server
from manifests import NAMESPACE, RENDERINGS, charted, key_of, kustomized

pytestmark = api_server.NEEDED


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ApiServer]:
    with running_server(tmp_path_factory.mktemp("api-server")) as server:
        yield server


@pytest.mark.parametrize("overlay", RENDERINGS)
def test_the_server_takes_every_object_of(overlay: str, server: ApiServer):
    manifests = kustomized(overlay)
    done = server.apply(manifests, "--dry-run=server")
    assert len(done.stdout.splitlines()) == len(manifests), done.stdout
    # The server warns of pods that the strictest level of Pod Security would refuse.
    warnings = [line for line in done.stderr.splitlines() if "would violate PodSecurity" in line]
    if overlay == "examples/node-store":
        # Its socket is in a folder of the node, and a root container makes that its own.
        assert len(warnings) == 1
    else:
        assert not warnings, done.stderr


def test_what_kustomize_applied_is_what_the_chart_would_apply(server: ApiServer):
    server.apply(kustomized("base"))
    done = server.kubectl("diff", "--server-side", "--filename=-", given=yaml.safe_dump_all(charted(None)))
    different = [line for line in done.stdout.splitlines() if line.startswith("diff ")]
    # The spelling of the configuration inside of the ConfigMaps is the tool's own.
    maps = {f"v1.ConfigMap.{NAMESPACE}.{name}" for kind, name in map(key_of, kustomized("base")) if kind == "ConfigMap"}
    assert {pathlib.Path(line.split()[-1]).name for line in different} <= maps, done.stdout
    assert done.returncode in (0, 1), done.stderr
