//! `EndpointSlices`, as far as they say where engines are.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::api::ObjectMeta;
use super::config::{KubernetesConfig, PortRef, WorkerNaming};

/// A part of the endpoints of a service. Absent lists may be written as null.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct EndpointSlice {
    pub(super) metadata: ObjectMeta,
    endpoints: Option<Vec<Endpoint>>,
    ports: Option<Vec<Port>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    addresses: Option<Vec<String>>,
    conditions: Option<Conditions>,
    target_ref: Option<TargetRef>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
struct Conditions {
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Debug, Clone, Deserialize)]
struct TargetRef {
    kind: Option<String>,
    name: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
struct Port {
    name: Option<String>,
    port: Option<u16>,
}

/// Where one engine is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Located {
    /// A host's address, without brackets.
    pub(super) address: String,
    pub(super) port: u16,
    pub(super) replay_port: Option<u16>,
    /// Whether it answers; one that has answered once is listened to for as long as it is there.
    pub(super) is_serving: bool,
}

impl EndpointSlice {
    /// Adds the engines of this slice by the names of their workers.
    ///
    /// An engine in several slices (both families of addresses, or on its way from one to the other) is there once;
    /// the choice does not depend on the order. One that ends and no longer answers is not there.
    pub(super) fn locate(&self, config: &KubernetesConfig, located: &mut BTreeMap<String, Located>) {
        let Some(port) = self.port(&config.port) else { return };
        let replay_port = config.replay_port.as_ref().and_then(|port| self.port(port));
        for endpoint in self.endpoints.iter().flatten() {
            let Some(address) = endpoint.addresses.iter().flatten().next() else { continue };
            let conditions = endpoint.conditions.unwrap_or_default();
            // What is not said is so.
            let is_serving = conditions.serving.or(conditions.ready).unwrap_or(true);
            if conditions.terminating == Some(true) && !is_serving {
                continue;
            }
            let pod = endpoint.target_ref.as_ref().filter(|target| target.kind.as_deref() == Some("Pod"));
            let worker = match (config.worker, pod.and_then(|pod| pod.name.as_ref())) {
                (WorkerNaming::Pod, Some(pod)) => pod.clone(),
                _ => address.clone(),
            };
            let found = Located { address: address.clone(), port, replay_port, is_serving };
            let known = located.entry(worker).or_insert_with(|| found.clone());
            // One that serves goes before one that does not.
            if (!found.is_serving, &found) < (!known.is_serving, known) {
                *known = found;
            }
        }
    }

    /// The number of a port; `None` if the slice has none of that name.
    fn port(&self, wanted: &PortRef) -> Option<u16> {
        match wanted {
            PortRef::Number(number) => Some(*number),
            PortRef::Name(name) => {
                let mut ports = self.ports.iter().flatten();
                ports.find(|port| port.name.as_ref() == Some(name))?.port
            }
        }
    }
}

impl Located {
    /// The endpoints of a rank: where it publishes and where it replays.
    pub(super) fn endpoints(&self, rank: u16) -> Option<(String, Option<String>)> {
        let endpoint = |port: u16| {
            let port = port.checked_add(rank)?;
            Some(if self.address.contains(':') {
                format!("tcp://[{}]:{port}", self.address)
            } else {
                format!("tcp://{}:{port}", self.address)
            })
        };
        Some((endpoint(self.port)?, self.replay_port.and_then(endpoint)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(worker: WorkerNaming) -> KubernetesConfig {
        KubernetesConfig {
            port: PortRef::Name("kv".to_owned()),
            replay_port: Some(PortRef::Number(6000)),
            worker,
            ..KubernetesConfig::default()
        }
    }

    fn located(slices: &[&str], worker: WorkerNaming) -> Vec<(String, Located)> {
        let mut located = BTreeMap::new();
        for slice in slices {
            let slice: EndpointSlice = serde_json::from_str(slice).unwrap();
            slice.locate(&config(worker), &mut located);
        }
        located.into_iter().collect()
    }

    const SLICE: &str = r#"{
        "metadata": {"name": "vllm-x7", "resourceVersion": "12", "managedFields": [{"manager": "k"}]},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}, {"name": "kv", "port": 5557}],
        "endpoints": [
            {"addresses": ["10.0.0.1"], "conditions": {"ready": true, "serving": true, "terminating": false},
             "targetRef": {"kind": "Pod", "name": "vllm-0", "namespace": "serving"}, "nodeName": "n1"},
            {"addresses": ["10.0.0.2"], "targetRef": {"kind": "Pod", "name": "vllm-1"}},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": false, "serving": true, "terminating": true}},
            {"addresses": ["10.0.0.4"], "conditions": {"ready": false, "serving": false, "terminating": true}},
            {"addresses": ["10.0.0.5"], "conditions": {"ready": false}},
            {"addresses": null}, {"addresses": []}
        ]}"#;

    #[test]
    fn engines_are_found_by_pod_address_and_named_port() {
        let found = located(&[SLICE], WorkerNaming::Pod);
        let shown: Vec<(&str, &str, bool)> = found
            .iter()
            .map(|(worker, located)| (worker.as_str(), located.address.as_str(), located.is_serving))
            .collect();
        assert_eq!(
            shown,
            [
                ("10.0.0.3", "10.0.0.3", true),
                ("10.0.0.5", "10.0.0.5", false),
                ("vllm-0", "10.0.0.1", true),
                ("vllm-1", "10.0.0.2", true),
            ]
        );
        assert!(found.iter().all(|(_, located)| (located.port, located.replay_port) == (5557, Some(6000))));
        let by_address = located(&[SLICE], WorkerNaming::Address);
        assert_eq!(by_address[0].0, "10.0.0.1");
    }

    #[test]
    fn a_pod_with_two_addresses_is_one_engine_whatever_comes_first() {
        let six = r#"{"metadata": {"name": "vllm-6"}, "ports": [{"name": "kv", "port": 5557}], "endpoints": [
            {"addresses": ["fd00::1"], "targetRef": {"kind": "Pod", "name": "vllm-0"}}]}"#;
        let found = located(&[SLICE, six], WorkerNaming::Pod);
        assert_eq!(found, located(&[six, SLICE], WorkerNaming::Pod));
        assert_eq!(found.iter().find(|(worker, _)| worker == "vllm-0").unwrap().1.address, "10.0.0.1");
        let alone = located(&[six], WorkerNaming::Pod);
        let (endpoint, replay) = alone[0].1.endpoints(2).unwrap();
        assert_eq!(
            (endpoint.as_str(), replay.as_deref()),
            ("tcp://[fd00::1]:5559", Some("tcp://[fd00::1]:6002"))
        );
    }

    #[test]
    fn a_slice_without_the_port_or_with_nothing_has_no_engines() {
        let without =
            r#"{"metadata": {"name": "a"}, "ports": null, "endpoints": [{"addresses": ["10.0.0.1"]}]}"#;
        assert_eq!(located(&[without], WorkerNaming::Pod), []);
        assert_eq!(located(&[r#"{"metadata": {}, "endpoints": null}"#], WorkerNaming::Pod), []);
    }
}
