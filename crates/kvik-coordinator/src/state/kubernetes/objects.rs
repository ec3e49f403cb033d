//! The two kinds of objects, with what is read and written of them. What others have put there stays.

use std::collections::BTreeMap;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Annotation with the term of the leader that wrote the object last.
const TERM: &str = "kvik-term";
/// Annotation with the base address of the leader.
const ADDRESS: &str = "kvik-address";
/// Where the members are in a `ConfigMap`.
const MEMBERS: &str = "members.json";

/// What is the same for all kinds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Metadata {
    name: String,
    /// Changes with every write; one that has another in its request is refused.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) resource_version: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    annotations: Option<BTreeMap<String, String>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// A `Lease` of `coordination.k8s.io/v1`: the leader.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Lease {
    pub(super) metadata: Metadata,
    #[serde(default)]
    pub(super) spec: LeaseSpec,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Times are those of the holder's clock, for people: nothing is decided by them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct LeaseSpec {
    holder_identity: Option<String>,
    lease_duration_seconds: Option<i64>,
    acquire_time: Option<String>,
    renew_time: Option<String>,
    lease_transitions: Option<i64>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// A `ConfigMap`: the members of a kind.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct MemberMap {
    pub(super) metadata: Metadata,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data: Option<BTreeMap<String, String>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

// === impl Metadata ===

impl Metadata {
    fn new(name: &str) -> Self {
        let labels = json!({
            "app.kubernetes.io/name": "kvik",
            "app.kubernetes.io/component": "coordinator",
            "app.kubernetes.io/part-of": "kvik",
        });
        let others = Map::from_iter([("labels".to_owned(), labels)]);
        Self { name: name.to_owned(), others, ..Self::default() }
    }

    /// The term under which the object was written; `None` if that is not known.
    pub(super) fn term(&self) -> Option<u64> {
        self.annotations.as_ref()?.get(TERM)?.parse().ok()
    }

    pub(super) fn set_term(&mut self, term: u64) {
        self.annotate(TERM, term.to_string());
    }

    fn annotate(&mut self, key: &str, value: String) {
        self.annotations.get_or_insert_default().insert(key.to_owned(), value);
    }
}

// === impl Lease ===

impl Lease {
    pub(super) fn new(name: &str) -> Self {
        Self { metadata: Metadata::new(name), spec: LeaseSpec::default(), others: Map::new() }
    }

    /// The identity of the holder; empty without one.
    pub(super) fn holder(&self) -> &str {
        self.spec.holder_identity.as_deref().unwrap_or_default()
    }

    /// The holder's base address, if it is a coordinator's.
    pub(super) fn address(&self) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(ADDRESS).map(String::as_str)
    }

    /// Time without a renewal after which the lead is lost, as its holder promises.
    pub(super) fn duration_s(&self) -> Option<u64> {
        self.spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok())
    }

    /// Gives it to a new holder.
    pub(super) fn take(&mut self, identity: &str, address: &str, term: u64, duration_s: u64) {
        self.metadata.set_term(term);
        self.metadata.annotate(ADDRESS, address.to_owned());
        let now = timestamp();
        self.spec.holder_identity = Some(identity.to_owned());
        self.spec.lease_duration_seconds = i64::try_from(duration_s).ok();
        self.spec.acquire_time = Some(now.clone());
        self.spec.renew_time = Some(now);
        self.spec.lease_transitions = Some(self.spec.lease_transitions.unwrap_or(-1).saturating_add(1));
    }

    pub(super) fn renew(&mut self) {
        self.spec.renew_time = Some(timestamp());
    }

    pub(super) fn release(&mut self) {
        self.spec.holder_identity = Some(String::new());
        self.renew();
    }
}

// === impl MemberMap ===

impl MemberMap {
    pub(super) fn new(name: &str) -> Self {
        Self { metadata: Metadata::new(name), data: None, others: Map::new() }
    }

    /// The members by id. Members that cannot be read are lost: they register again.
    pub(super) fn members(&self) -> BTreeMap<String, Value> {
        let Some(text) = self.data.as_ref().and_then(|data| data.get(MEMBERS)) else {
            return BTreeMap::new();
        };
        serde_json::from_str(text).unwrap_or_else(|error| {
            tracing::warn!(%error, name = self.metadata.name, "passed over members that cannot be read");
            BTreeMap::new()
        })
    }

    pub(super) fn set_members(&mut self, members: &BTreeMap<String, Value>) {
        // Strings and values always are JSON.
        let text = serde_json::to_string(members).unwrap_or_default();
        self.data.get_or_insert_default().insert(MEMBERS.to_owned(), text);
    }
}

/// The wall clock as Kubernetes writes it.
fn timestamp() -> String {
    humantime::format_rfc3339_micros(SystemTime::now()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_have_put_into_an_object_stays() {
        let text = r#"{"apiVersion":"coordination.k8s.io/v1","kind":"Lease",
            "metadata":{"name":"kvik","resourceVersion":"7","labels":{"team":"a"},"annotations":{"note":"b"}},
            "spec":{"holderIdentity":"x","leaseTransitions":4,"strategy":"OldestEmulationVersion"}}"#;
        let mut lease: Lease = serde_json::from_str(text).unwrap();
        assert_eq!((lease.holder(), lease.metadata.term(), lease.address()), ("x", None, None));
        lease.take("y", "http://y:1", 9, 6);
        let written = serde_json::to_value(&lease).unwrap();
        assert_eq!(written["kind"], "Lease");
        assert_eq!(written["metadata"]["resourceVersion"], "7");
        assert_eq!(written["metadata"]["labels"]["team"], "a");
        assert_eq!(
            written["metadata"]["annotations"],
            json!({ "note": "b", "kvik-term": "9", "kvik-address": "http://y:1" })
        );
        assert_eq!(written["spec"]["strategy"], "OldestEmulationVersion");
        assert_eq!(written["spec"]["leaseTransitions"], 5);
    }

    #[test]
    fn damaged_members_are_none() {
        let mut map = MemberMap::new("kvik-workers");
        map.set_members(&BTreeMap::from([("w0".to_owned(), json!({ "a": 1 }))]));
        assert_eq!(map.members().len(), 1);
        map.data.as_mut().unwrap().insert(MEMBERS.to_owned(), "{".to_owned());
        assert!(map.members().is_empty());
        assert!(MemberMap::new("kvik-workers").members().is_empty());
    }
}
