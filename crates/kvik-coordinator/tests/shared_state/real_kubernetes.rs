//! A real API server of Kubernetes, and an account that may do what the manifests of `deploy/` allow and nothing else.

use std::time::Duration;

use http::Method;
use kvik_coordinator::{CoordinatorConfig, KubernetesStateConfig, StateBackendKind, StateConfig};
use serde_json::{Value, json};

use crate::kube_server::KubeServer;
use crate::kubernetes::{ApiServer, LEASE, LEASES, NAMESPACE, leader_of, take_over};
use crate::suite::SharedState;
use crate::support::config;

const ACCOUNT: &str = "kvik-coordinator";

pub(crate) struct RealKubernetes {
    server: KubeServer,
    url: String,
}

impl SharedState for RealKubernetes {
    const REPLACED_WITHIN: Duration = Duration::from_secs(15);
    const CAMPAIGN_PATH: &str = LEASES;

    async fn start() -> Self {
        let server = KubeServer::start().await;
        server.add_account(ACCOUNT).await;
        let roles = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}");
        let maps = ["kvik-coordinator-workers", "kvik-coordinator-stores"];
        let rules = json!([
            rule("coordination.k8s.io", "leases", &["create"], &[]),
            rule("coordination.k8s.io", "leases", &["get", "update"], &["kvik-coordinator"]),
            rule("", "configmaps", &["create"], &[]),
            rule("", "configmaps", &["get", "update"], &maps),
        ]);
        server
            .create(&format!("{roles}/roles"), &json!({ "metadata": { "name": ACCOUNT }, "rules": rules }))
            .await;
        let binding = json!({
            "metadata": { "name": ACCOUNT },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT },
            "subjects": [{ "kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE }],
        });
        server.create(&format!("{roles}/rolebindings"), &binding).await;
        let url = format!("https://localhost:{}", server.port());
        Self { server, url }
    }

    fn url(&self) -> &str {
        &self.url
    }

    fn config(&self) -> CoordinatorConfig {
        let kubernetes = KubernetesStateConfig {
            api: self.url.clone(),
            namespace: Some(NAMESPACE.to_owned()),
            token_file: self.server.folder().join("token"),
            ca_file: self.server.folder().join("ca.crt"),
            ..KubernetesStateConfig::default()
        };
        let state =
            StateConfig { backend: StateBackendKind::Kubernetes, kubernetes, ..StateConfig::default() };
        CoordinatorConfig { state, ..config() }
    }

    fn config_at(&self, _url: &str) -> CoordinatorConfig {
        panic!("no proxy reads what is said over TLS");
    }

    async fn leader(&self) -> Option<String> {
        let (_, lease) = self.server.call(Method::GET, LEASE, None).await?;
        leader_of(&lease)
    }

    async fn remove_leader(&self) {
        take_over(self).await;
    }

    fn kill(&mut self) {
        self.server.kill();
    }

    async fn restart(&mut self) {
        self.server.restart().await;
    }
}

impl ApiServer for RealKubernetes {
    async fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> (u16, Value) {
        let (status, object) = self.server.call(method, path, body).await.unwrap();
        (status.as_u16(), object)
    }
}

/// What an account may do to objects of some names; of no name: of every name.
fn rule(group: &str, resource: &str, verbs: &[&str], names: &[&str]) -> Value {
    json!({ "apiGroups": [group], "resources": [resource], "verbs": verbs, "resourceNames": names })
}
