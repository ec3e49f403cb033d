//! `InferencePool` and `Pod`, as far as they say where engines are.

use std::collections::BTreeMap;

use kvik_gateway::{BackendConfig, Role};
use kvik_indexer::sources::engine::EngineConfig;
use kvik_indexer::sources::kubernetes::ObjectMeta;
use serde::Deserialize;

use crate::config::InferencePoolConfig;

/// A set of pods that serve the same model.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct InferencePool {
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    spec: PoolSpec,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PoolSpec {
    selector: Selector,
    target_ports: Vec<TargetPort>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Selector {
    match_labels: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
struct TargetPort {
    number: u16,
}

/// A pod.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Pod {
    pub(super) metadata: PodMeta,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PodMeta {
    pub(super) name: String,
    pub(super) resource_version: String,
    labels: Option<BTreeMap<String, String>>,
    deletion_timestamp: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodStatus {
    phase: String,
    #[serde(rename = "podIP")]
    pod_ip: String,
    conditions: Option<Vec<Condition>>,
}

#[derive(Debug, Clone, Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

/// An engine of a pool: a port of a ready pod.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Engine {
    pub(super) backend: BackendConfig,
    /// Where it publishes KV events, if it does.
    pub(super) events: Option<EngineConfig>,
}

impl InferencePool {
    /// The labels of its pods, as `kubectl --selector` takes them; `None` if it has none, which selects no pod.
    pub(super) fn selector(&self) -> Option<String> {
        let labels = &self.spec.selector.match_labels;
        let selector: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        (!selector.is_empty()).then(|| selector.join(","))
    }

    /// The engines of its ready pods: one for each port, in the order of the pods' names.
    pub(super) fn engines<'a>(
        &self,
        pods: impl Iterator<Item = &'a Pod>,
        config: &InferencePoolConfig,
    ) -> Vec<Engine> {
        let mut engines = Vec::new();
        for pod in pods.filter(|pod| pod.is_ready()) {
            for (number, port) in self.spec.target_ports.iter().enumerate() {
                engines.push(pod.engine(number as u16, port.number, config));
            }
        }
        engines
    }
}

impl Pod {
    /// Whether it takes requests.
    fn is_ready(&self) -> bool {
        let Self { metadata, status } = self;
        let is_condition = |condition: &Condition| condition.kind == "Ready" && condition.status == "True";
        metadata.deletion_timestamp.is_none()
            && status.phase == "Running"
            && !status.pod_ip.is_empty()
            && status.conditions.iter().flatten().any(is_condition)
    }

    /// The engine behind its n-th port.
    fn engine(&self, number: u16, port: u16, config: &InferencePoolConfig) -> Engine {
        let address = &self.status.pod_ip;
        let host = if address.contains(':') { format!("[{address}]") } else { address.clone() };
        let labels = self.metadata.labels.as_ref();
        let role = match labels.and_then(|labels| labels.get(&config.role_label)).map(String::as_str) {
            Some("prefill") if config.pd.is_some() => Role::Prefill,
            Some("decode") if config.pd.is_some() => Role::Decode,
            _ => Role::Both,
        };
        let url = format!("http://{host}:{port}");
        let endpoint = |first: u16| Some(format!("tcp://{host}:{}", first.checked_add(number)?));
        let events = config.kv_events.port.and_then(endpoint).map(|endpoint_url| EngineConfig {
            endpoint: endpoint_url,
            replay_endpoint: config.kv_events.replay_port.and_then(endpoint),
            topic: config.kv_events.topic.clone(),
            worker: Some(url.clone()),
            model: config.model.clone(),
            rank: number.into(),
            ..EngineConfig::default()
        });
        let (model, pd) = (config.model.clone(), config.pd);
        Engine { backend: BackendConfig { url, model, role, pd, ..BackendConfig::default() }, events }
    }
}

#[cfg(test)]
mod tests {
    use kvik_gateway::PdProtocol;
    use serde_json::{Value, json};

    use super::*;
    use crate::config::PoolEventsConfig;

    fn pool() -> InferencePool {
        serde_json::from_value(json!({
            "metadata": {"name": "vllm", "resourceVersion": "5"},
            "spec": {
                "selector": {"matchLabels": {"app": "vllm", "tier": "serving"}},
                "targetPorts": [{"number": 8000}, {"number": 8001}],
                "endpointPickerRef": {"name": "epp", "port": {"number": 9002}, "failureMode": "FailClose"},
            },
        }))
        .unwrap()
    }

    fn pod(change: impl FnOnce(&mut Value)) -> Pod {
        let mut pod = json!({
            "metadata": {"name": "vllm-0", "resourceVersion": "6", "labels": {"llm-d.ai/role": "prefill"}},
            "status": {
                "phase": "Running", "podIP": "10.0.0.1",
                "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}],
            },
        });
        change(&mut pod);
        serde_json::from_value(pod).unwrap()
    }

    fn urls(pod: &Pod) -> Vec<String> {
        let engines = pool().engines([pod].into_iter(), &InferencePoolConfig::default());
        engines.into_iter().map(|engine| engine.backend.url).collect()
    }

    #[test]
    fn every_port_of_a_ready_pod_is_an_engine() {
        assert_eq!(pool().selector().as_deref(), Some("app=vllm,tier=serving"));
        assert_eq!(urls(&pod(|_| ())), ["http://10.0.0.1:8000", "http://10.0.0.1:8001"]);
        let six = pod(|pod| pod["status"]["podIP"] = json!("fd00::1"));
        assert_eq!(urls(&six), ["http://[fd00::1]:8000", "http://[fd00::1]:8001"]);
    }

    #[test]
    fn a_pod_that_is_not_ready_or_ends_is_none() {
        let changes: [fn(&mut Value); 5] = [
            |pod| pod["status"]["phase"] = json!("Pending"),
            |pod| pod["status"]["conditions"][1]["status"] = json!("False"),
            |pod| pod["status"]["conditions"] = Value::Null,
            |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"),
            |pod| pod["status"]["podIP"] = json!(""),
        ];
        for change in changes {
            assert!(urls(&pod(change)).is_empty());
        }
        let empty: Pod = serde_json::from_str(r#"{"metadata": {"name": "a"}}"#).unwrap();
        assert!(urls(&empty).is_empty());
    }

    #[test]
    fn a_pool_without_labels_selects_nothing() {
        let pool: InferencePool = serde_json::from_str(r#"{"metadata": {"name": "a"}}"#).unwrap();
        assert_eq!(pool.selector(), None);
    }

    #[test]
    fn roles_and_events_are_those_that_the_configuration_says() {
        let config = InferencePoolConfig {
            model: Some("m".to_owned()),
            pd: Some(PdProtocol::NixlPull),
            kv_events: PoolEventsConfig {
                port: Some(5557),
                replay_port: Some(6000),
                ..PoolEventsConfig::default()
            },
            ..InferencePoolConfig::default()
        };
        let engines = pool().engines([&pod(|_| ())].into_iter(), &config);
        let second = &engines[1];
        assert_eq!((second.backend.role, second.backend.pd), (Role::Prefill, Some(PdProtocol::NixlPull)));
        let events = second.events.as_ref().unwrap();
        assert_eq!(events.endpoint, "tcp://10.0.0.1:5558");
        assert_eq!(events.replay_endpoint.as_deref(), Some("tcp://10.0.0.1:6001"));
        assert_eq!(events.worker.as_deref(), Some("http://10.0.0.1:8001"));
        let plain = pool().engines([&pod(|_| ())].into_iter(), &InferencePoolConfig::default());
        assert_eq!((plain[0].backend.role, plain[0].events.is_none()), (Role::Both, true));
    }
}
