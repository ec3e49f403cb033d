"""Every object of deploy/ is valid for several releases of Kubernetes, fits the others, and runs with few rights."""

import json
import re
import subprocess

import kubernetes_validate
import pytest
import yaml
from conftest import binary
from manifests import (
    CHART,
    KUBERNETES,
    NAMESPACE,
    RENDERINGS,
    ROOT,
    SECTIONS,
    WORKLOADS,
    charted,
    config_of,
    container_of,
    find,
    key_of,
    kustomized,
    of_kind,
    output_of,
    pod_labels_of,
    pod_of,
    role_of,
    sections_of,
    tool,
    workspace_version,
)


def rule(group: str, resource: str, verbs: list[str], names: list[str] | None = None) -> dict:
    """What an account may do, as a Role says it."""
    limited = {"resourceNames": names} if names else {}
    return {"apiGroups": [group], "resources": [resource], "verbs": verbs, **limited}


# The oldest that has a sleep before the stop of a container, one in the middle, and the newest.
RELEASES = ["1.30", "1.33", "1.37"]
# Objects that Kubernetes itself does not know, by the operator that brings them.
CUSTOM_KINDS = {"ServiceMonitor", "PrometheusRule", "ManagedCertificate", "BackendConfig", "InferencePool", "HTTPRoute"}
# The account of a coordinator has the same in the tests of `crates/kvik-coordinator` with a real API server.
RULES = {
    "kvik-gateway": [rule("discovery.k8s.io", "endpointslices", ["get", "list", "watch"])],
    "kvik-coordinator": [
        rule("coordination.k8s.io", "leases", ["create"]),
        rule("coordination.k8s.io", "leases", ["get", "update"], ["kvik-coordinator"]),
        rule("", "configmaps", ["create"]),
        rule("", "configmaps", ["get", "update"], ["kvik-coordinator-workers", "kvik-coordinator-stores"]),
    ],
    # What a picker asks for in test_picker.py.
    "kvik-epp": [
        rule("inference.networking.k8s.io", "inferencepools", ["list", "watch"]),
        rule("", "pods", ["list", "watch"]),
    ],
}
# Metrics of others: cAdvisor, kube-state-metrics and NVIDIA's DCGM exporter.
OTHER_METRICS = {"container_cpu_usage_seconds_total", "kube_pod_container_resource_limits", "DCGM_FI_DEV_GPU_UTIL"}
SUBCOMMANDS = {
    "gateway": ["gateway"],
    "coordinator": ["coordinator"],
    "worker": ["worker"],
    "store": ["store", "serve"],
    "epp": ["epp"],
}


@pytest.fixture(params=RENDERINGS)
def rendered(request) -> list[dict]:
    return kustomized(request.param)


@pytest.fixture
def workloads(rendered) -> list[dict]:
    return of_kind(rendered, *WORKLOADS)


@pytest.mark.parametrize("overlay", RENDERINGS)
def test_the_chart_and_kustomize_give_the_same_objects(overlay: str):
    by_kustomize = {key_of(manifest): comparable(manifest) for manifest in kustomized(overlay)}
    by_helm = {key_of(manifest): comparable(manifest) for manifest in charted(RENDERINGS[overlay])}
    assert by_kustomize.keys() == by_helm.keys()
    for key, manifest in by_kustomize.items():
        assert manifest == by_helm[key], key


def comparable(manifest: dict) -> dict:
    """The object with the configuration inside of it read: its spelling does not count."""
    if manifest["kind"] == "ConfigMap":
        data = {name: yaml.safe_load(text) for name, text in manifest["data"].items()}
        return {**manifest, "data": data}
    return manifest


@pytest.mark.parametrize("release", RELEASES)
def test_every_object_fits_the_schemas_of(release: str, rendered):
    for manifest in rendered:
        if manifest["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(manifest, release, strict=True)


def test_objects_are_in_one_namespace_and_no_two_have_one_name(rendered):
    assert {manifest["metadata"]["namespace"] for manifest in rendered} == {NAMESPACE}
    keys = [key_of(manifest) for manifest in rendered]
    assert len(keys) == len(set(keys))


def test_containers_run_as_a_plain_user_on_a_read_only_root_without_rights(workloads):
    for workload in workloads:
        pod = pod_of(workload)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
        assert "add" not in container_of(workload)["securityContext"]["capabilities"]
        assert "runAsUser" not in container_of(workload)["securityContext"]


def test_only_the_store_of_a_node_uses_a_folder_of_the_node_and_only_to_own_it_is_there_a_root_container(workloads):
    for workload in workloads:
        pod = pod_of(workload)
        folders = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
        assert folders == (["/run/kvik"] if role_of(workload) == "store" else [])
        for container in pod.get("initContainers", []):
            assert role_of(workload) == "store"
            assert container["command"][0] == "install"
            assert container["securityContext"]["capabilities"]["add"] == ["CHOWN", "FOWNER"]


def test_images_have_the_version_of_the_workspace(workloads):
    for workload in workloads:
        assert container_of(workload)["image"] == f"kvik:{workspace_version()}"
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (workspace_version(), workspace_version())


def test_only_what_talks_to_the_api_server_has_a_token_and_the_fewest_rights(rendered, workloads):
    for role in of_kind(rendered, "Role"):
        assert role["rules"] == RULES[role["metadata"]["name"]]
    assert not of_kind(rendered, "ClusterRole", "ClusterRoleBinding")
    bound = {subject["name"] for binding in of_kind(rendered, "RoleBinding") for subject in binding["subjects"]}
    for workload in workloads:
        pod = pod_of(workload)
        assert pod["automountServiceAccountToken"] is (pod["serviceAccountName"] in bound)
        find(rendered, "ServiceAccount", pod["serviceAccountName"])


def test_selectors_find_the_pods_they_are_for(rendered, workloads):
    for workload in workloads:
        assert workload["spec"]["selector"]["matchLabels"].items() <= pod_labels_of(workload).items()
        for spread in pod_of(workload).get("topologySpreadConstraints", []):
            assert spread["labelSelector"]["matchLabels"].items() <= pod_labels_of(workload).items()
        if workload["kind"] != "DaemonSet":
            keys = [spread["topologyKey"] for spread in pod_of(workload)["topologySpreadConstraints"]]
            assert keys == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    for service in of_kind(rendered, "Service"):
        (workload,) = selected(workloads, service["spec"]["selector"])
        ports = {port["name"]: port["containerPort"] for port in container_of(workload)["ports"]}
        for port in service["spec"]["ports"]:
            # Network policies count the port of the pod: one number for both keeps them readable.
            assert ports[port["targetPort"]] == port["port"]
        if workload["kind"] == "StatefulSet":
            assert workload["spec"]["serviceName"] == service["metadata"]["name"]
            assert workload["spec"]["podManagementPolicy"] == "Parallel"
    for budget in of_kind(rendered, "PodDisruptionBudget"):
        assert len(selected(workloads, budget["spec"]["selector"]["matchLabels"])) == 1
    for monitor in of_kind(rendered, "ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        services = [
            service
            for service in of_kind(rendered, "Service")
            if labels.items() <= service["metadata"]["labels"].items()
        ]
        assert len(services) == len(workloads)
        for endpoint, service in ((e, s) for e in monitor["spec"]["endpoints"] for s in services):
            assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]


def selected(workloads: list[dict], labels: dict[str, str]) -> list[dict]:
    return [workload for workload in workloads if labels.items() <= pod_labels_of(workload).items()]


def test_every_replicated_role_has_a_disruption_budget(rendered, workloads):
    budgets = {manifest["metadata"]["name"] for manifest in of_kind(rendered, "PodDisruptionBudget")}
    assert budgets == {key_of(workload)[1] for workload in workloads if workload["kind"] != "DaemonSet"}


def test_ports_of_pods_are_those_the_configuration_listens_on(rendered, workloads):
    for workload in workloads:
        role = role_of(workload)
        config = config_of(rendered, role)
        listens = {"http": config["metrics" if role == "store" else "listen"]}
        if role == "store":
            listens["peer"] = config["peer"]["listen"]
        if role == "epp":
            listens = {"grpc": config["listen"], "http": sections_of(rendered, role)["gateway"]["listen"]}
        ports = {port["name"]: port["containerPort"] for port in container_of(workload)["ports"]}
        assert ports == {name: int(address.rpartition(":")[2]) for name, address in listens.items()}
        container = container_of(workload)
        for probe in ("livenessProbe", "readinessProbe"):
            if "grpc" in container[probe]:
                # A kubelet takes a number there, and no name.
                assert container[probe]["grpc"]["port"] == ports["grpc"]
            else:
                assert container[probe]["httpGet"]["port"] in ports


def test_the_binary_knows_every_flag_and_every_setting(rendered, workloads, tmp_path):
    for workload in workloads:
        role = role_of(workload)
        args = container_of(workload)["args"]
        words = SUBCOMMANDS[role]
        assert args[: len(words)] == words
        known = set(re.findall(r"--[a-z-]+", output_of(binary(), *words, "--help")))
        assert {flag.partition("=")[0] for flag in args[len(words) :]} <= known
        settings = effective(rendered, role, tmp_path)
        fields = {name.upper().replace(".", "_") for name in settings}
        for variable in container_of(workload)["env"]:
            name = variable["name"]
            if name != "POD_NAME":
                field = name.removeprefix(f"KVIK_{role.upper()}_").removeprefix("KVIK_")
                assert field in fields, f"{role} has no setting for {name}"


def effective(rendered: list[dict], role: str, folder) -> dict[str, object]:
    """The settings with which the binary would run, by its own account; it refuses a file that it does not know.

    Of two sections with the same field that of the role's own name counts.
    """
    file = folder / "kvik.yaml"
    file.write_text(find(rendered, "ConfigMap", f"kvik-{role}")["data"]["kvik.yaml"])
    roles = json.loads(output_of(binary(), "config", "--config", str(file), "--json"))
    sections = reversed(SECTIONS.get(role, [role]))
    return {name: field["value"] for section in sections for name, field in roles[section].items()}


def test_pods_have_time_to_drain(rendered, workloads, tmp_path):
    for workload in workloads:
        role = role_of(workload)
        pause = container_of(workload).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        # A coordinator has a fixed time to give up its lead.
        grace = effective(rendered, role, tmp_path).get("drain_grace_s", 10)
        assert pause + grace < pod_of(workload)["terminationGracePeriodSeconds"], role
        assert (pause > 0) is (role in ("gateway", "epp")), "only gateways and pickers are found by a Service"


def test_what_is_mounted_is_there(rendered, workloads):
    for workload in workloads:
        pod = pod_of(workload)
        claims = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])]
        volumes = {volume["name"]: volume for volume in pod["volumes"]} | {claim: {} for claim in claims}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            for mount in container["volumeMounts"]:
                volume = volumes[mount["name"]]
                assert mount.get("readOnly", False) is bool({"configMap", "secret"} & volume.keys())
                if "configMap" in volume:
                    find(rendered, "ConfigMap", volume["configMap"]["name"])
        files = {item["path"] for item in volumes["tokens"]["secret"]["items"]}
        named = [variable["value"] for variable in container_of(workload)["env"] if variable["name"].endswith("_FILE")]
        named += re.findall(
            r"token_file: (\S+)", find(rendered, "ConfigMap", f"kvik-{role_of(workload)}")["data"]["kvik.yaml"]
        )
        assert {f"/run/secrets/kvik/{file}" for file in files} == set(named)


@pytest.mark.parametrize("overlay", ["examples/inference-pool", "examples/inference-pool-tls"])
def test_the_route_leads_to_the_pool_which_names_the_picker_that_follows_it(overlay: str):
    manifests = kustomized(overlay)
    (route,) = of_kind(manifests, "HTTPRoute")
    (pool,) = of_kind(manifests, "InferencePool")
    group = pool["apiVersion"].partition("/")[0]
    reference = {"group": group, "kind": "InferencePool", "name": pool["metadata"]["name"]}
    assert [rule["backendRefs"] for rule in route["spec"]["rules"]] == [[reference]]
    picker = pool["spec"]["endpointPickerRef"]
    service = find(manifests, picker["kind"], picker["name"])
    (port,) = [port for port in service["spec"]["ports"] if port["port"] == picker["port"]["number"]]
    assert port["appProtocol"] == ("http2" if overlay.endswith("-tls") else "kubernetes.io/h2c")
    config = config_of(manifests, "epp")
    assert config["pool"]["name"] == f"{NAMESPACE}/{pool['metadata']['name']}"
    # The picker reaches the engines that the pool selects.
    engines = find(manifests, "NetworkPolicy", "kvik-epp")["spec"]["egress"][0]
    assert engines["to"] == [{"podSelector": {"matchLabels": pool["spec"]["selector"]["matchLabels"]}}]
    ports = [port["number"] for port in pool["spec"]["targetPorts"]]
    assert [port["port"] for port in engines["ports"]] == ports + list(config["pool"]["kv_events"].values())


def test_the_chart_lets_a_picker_reach_every_port_of_every_engine_of_a_pod():
    def ports_with(*settings: str) -> list[int]:
        manifests = charted(RENDERINGS["examples/inference-pool"], *settings)
        return [port["port"] for port in find(manifests, "NetworkPolicy", "kvik-epp")["spec"]["egress"][0]["ports"]]

    ranks = ports_with("--set=epp.pool.targetPorts={8000,8001}", "--set=epp.config.pool.kv_events.replay_port=6000")
    assert ranks == [8000, 8001, 5557, 5558, 6000, 6001]
    assert ports_with("--set=epp.config.pool.kv_events=null") == [8000]


def test_the_chart_leaves_a_pool_and_a_route_that_are_there_alone():
    settings = ["--set=epp.pool.create=false", "--set=epp.route.create=false"]
    manifests = charted(RENDERINGS["examples/inference-pool"], *settings)
    assert not of_kind(manifests, "InferencePool", "HTTPRoute")
    assert find(manifests, "Deployment", "kvik-epp")


def test_autoscalers_have_the_numbers_of_the_design():
    scalers = {
        manifest["metadata"]["name"]: manifest["spec"]
        for manifest in of_kind(kustomized("gke"), "HorizontalPodAutoscaler")
    }
    gateway, worker = scalers["kvik-gateway"], scalers["kvik-worker"]
    assert (gateway["minReplicas"], gateway["maxReplicas"]) == (2, 10)
    assert gateway["metrics"][0]["resource"]["target"]["averageUtilization"] == 70
    assert (worker["minReplicas"], worker["maxReplicas"]) == (4, 16)
    assert worker["behavior"]["scaleUp"]["stabilizationWindowSeconds"] == 3 * 60
    assert worker["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 10 * 60
    for name, spec in scalers.items():
        # An autoscaler and a fixed number would undo each other with every apply.
        assert "replicas" not in find(kustomized("gke"), spec["scaleTargetRef"]["kind"], name)["spec"]


@pytest.mark.parametrize("overlay", ["examples/all", "gke"])
def test_metrics_of_rules_and_autoscalers_are_those_of_the_adapter_and_the_rules(overlay: str):
    manifests = kustomized(overlay)
    adapter = yaml.safe_load((KUBERNETES / "components/worker-autoscaling/prometheus-adapter.yaml").read_text())
    served = {rule["name"]["as"]: rule for kind in ("custom", "external") for rule in adapter["rules"][kind]}
    spec = find(manifests, "HorizontalPodAutoscaler", "kvik-worker")["spec"]
    asked = {metric[metric["type"].lower()]["metric"]["name"] for metric in spec["metrics"]}
    assert asked == served.keys()
    groups = find(manifests, "PrometheusRule", "kvik-worker-autoscaling")["spec"]["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"]}
    for expression in (rule["expr"] for group in groups for rule in group["rules"]):
        asked = set(re.findall(r"[A-Za-z_][A-Za-z0-9_:]*(?=\{)|kvik:[a-z_:]+", expression))
        assert asked, expression
        assert asked <= recorded | OTHER_METRICS, expression
    for rule in served.values():
        (series,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
        assert series in recorded or f"| `{series}`" in (ROOT / "crates/kvik-worker/src/metrics.rs").read_text()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("gateway.replcas=3", "replcas"),
        ("coordinator.replicas=3", "coordinator.kubernetesState.enabled"),
        ("coordinator.kubernetesState.enabled=true,coordinator.etcd.endpoints={http://e:1}", "one of them"),
        ("coordinator.replicas=4", "replicas"),
        ("gateway.config.drain_grace_s=25", "gateway.terminationGracePeriodSeconds (30)"),
        ("worker.config.drain_grace_s=30", "worker.terminationGracePeriodSeconds (30)"),
        ("worker.autoscaling.scaleUpAbove=80", "scaleUpAbove"),
        ("gke.enabled=true", "gke.domains"),
        ("epp.enabled=true,epp.gatewayConfig.drain_grace_s=25", "epp.terminationGracePeriodSeconds (30)"),
        ("epp.pool.failureMode=Open", "failureMode"),
        ("epp.config.pool.name=kvik/vllm", "name"),
    ],
)
def test_the_chart_refuses_by_name(setting: str, message: str):
    command = [tool("helm"), "template", "kvik", str(CHART), "--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr


def test_helm_finds_nothing_to_complain_about():
    output_of(tool("helm"), "lint", "--strict", str(CHART))
