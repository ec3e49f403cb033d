//! What holds of a state in the API server of Kubernetes.

use std::time::Duration;

use http::Method;
use kvik_coordinator::KubernetesStateConfig;
use serde_json::{Value, json};
use tokio::time::MissedTickBehavior;

use crate::suite::{Node, PATIENCE, SharedState, everybody_knows_all, register_all, three};
use crate::support::{client, eventually, ids, registration};

pub(crate) const NAMESPACE: &str = "serving";
pub(crate) const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/serving/leases";
pub(crate) const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/serving/leases/kvik-coordinator";
const WORKERS: &str = "/api/v1/namespaces/serving/configmaps/kvik-coordinator-workers";
/// Time between two changes of an object by another hand.
const CHANGE_INTERVAL: Duration = Duration::from_millis(20);

/// A state whose objects can be looked at and changed.
pub(crate) trait ApiServer: SharedState {
    /// Asks as an administrator; gives status and object.
    async fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> (u16, Value);
}

/// Does what a coordinator does that takes the lead over, and is never heard of again.
pub(crate) async fn take_over(server: &impl ApiServer) {
    for path in [LEASE, WORKERS] {
        // The leader renews and writes at the same time.
        eventually(PATIENCE, "the object is changed", async || {
            let (_, mut object) = server.ask(Method::GET, path, None).await;
            let metadata = &mut object["metadata"];
            let term: u64 = metadata["annotations"]["kvik-term"].as_str()?.parse().unwrap();
            metadata["annotations"]["kvik-term"] = json!((term + 1).to_string());
            if path == LEASE {
                metadata["annotations"]["kvik-address"] = json!("http://127.0.0.1:9");
                object["spec"]["holderIdentity"] = json!("another");
            }
            (server.ask(Method::PUT, path, Some(&object)).await.0 == 200).then_some(())
        })
        .await;
    }
}

/// The base address of the leader that a Lease names.
pub(crate) fn leader_of(lease: &Value) -> Option<String> {
    let is_held = lease["spec"]["holderIdentity"].as_str().is_some_and(|holder| !holder.is_empty());
    is_held.then(|| lease["metadata"]["annotations"]["kvik-address"].as_str().unwrap().to_owned())
}

pub(crate) async fn a_lead_is_taken_over_after_its_duration_whatever_the_clock_of_its_holder_says<
    S: ApiServer,
>() {
    let duration_s = KubernetesStateConfig::default().lease_duration_s;
    // Holders that are gone; the clock of one was an hour late, that of the other a century early.
    for renewed in ["2020-01-01T00:00:00.000000Z", "2126-01-01T00:00:00.000000Z"] {
        let state = S::start().await;
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": { "name": "kvik-coordinator", "annotations": { "kvik-term": "41", "kvik-address": "http://gone:1" } },
            "spec": { "holderIdentity": "gone", "leaseDurationSeconds": duration_s, "renewTime": renewed },
        });
        assert_eq!(state.ask(Method::POST, LEASES, Some(&lease)).await.0, 201);
        let node = Node::start(state.config()).await;
        let (snapshot, took) =
            eventually(PATIENCE, "the coordinator leads", async || client(node.base()).workers().await.ok())
                .await;
        assert_eq!(snapshot.term, 42);
        assert!(Duration::from_secs(duration_s) <= took, "{took:?}");
        assert!(took < S::REPLACED_WITHIN, "{took:?}");
    }
}

pub(crate) async fn objects_that_others_change_at_the_same_time_lose_nothing<S: ApiServer>() {
    let state = S::start().await;
    let nodes = three(state.config()).await;
    let changing = async {
        let mut interval = tokio::time::interval(CHANGE_INTERVAL);
        // On a slow machine too there is time between two changes.
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for number in 0_u64.. {
            interval.tick().await;
            for path in [LEASE, WORKERS] {
                let (status, mut object) = state.ask(Method::GET, path, None).await;
                if status == 200 {
                    object["metadata"]["annotations"]["note"] = json!(number.to_string());
                    // Which of the two is refused does not matter.
                    state.ask(Method::PUT, path, Some(&object)).await;
                }
            }
        }
    };
    let registering = async {
        for turn in 0..50 {
            let node = &nodes[turn % nodes.len()];
            let request = registration(&format!("late-{turn:02}"), 1);
            eventually(PATIENCE, "a registration is taken", async || {
                client(node.base()).register(&request).await.ok()
            })
            .await;
        }
    };
    tokio::select! {
        () = changing => {}
        () = registering => {}
    }
    everybody_knows_fifty(&nodes).await;
    let (_, written) = state.ask(Method::GET, WORKERS, None).await;
    let members: Value = serde_json::from_str(written["data"]["members.json"].as_str().unwrap()).unwrap();
    assert_eq!(members.as_object().unwrap().len(), 50);
}

async fn everybody_knows_fifty(nodes: &[Node]) {
    for node in nodes {
        eventually(PATIENCE, "every coordinator knows every worker", async || {
            let snapshot = client(node.base()).workers().await.ok()?;
            (ids(&snapshot).len() == 50).then_some(())
        })
        .await;
    }
}

pub(crate) async fn members_that_were_removed_by_hand_are_written_again<S: ApiServer>() {
    let state = S::start().await;
    let nodes = three(state.config()).await;
    register_all(&nodes).await;
    assert_eq!(state.ask(Method::DELETE, WORKERS, None).await.0, 200);
    client(nodes[0].base()).register(&registration("late", 1)).await.unwrap();
    let (_, written) = state.ask(Method::GET, WORKERS, None).await;
    let members: Value = serde_json::from_str(written["data"]["members.json"].as_str().unwrap()).unwrap();
    assert_eq!(members.as_object().unwrap().len(), 9);
}

pub(crate) async fn a_lease_that_was_removed_comes_back_with_a_later_term<S: ApiServer>() {
    let state = S::start().await;
    let nodes = three(state.config()).await;
    register_all(&nodes).await;
    let before = client(nodes[0].base()).workers().await.unwrap();
    assert_eq!(state.ask(Method::DELETE, LEASE, None).await.0, 200);
    for node in &nodes {
        eventually(PATIENCE, "a later term", async || {
            let snapshot = client(node.base()).workers().await.ok()?;
            (snapshot.term > before.term).then_some(())
        })
        .await;
    }
    everybody_knows_all(&nodes).await;
}
