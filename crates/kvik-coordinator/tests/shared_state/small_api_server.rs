//! What is used of an API server of Kubernetes: objects with versions that are read, created, replaced and deleted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::IntoResponse;
use http::{Method, StatusCode, Uri};
use kvik_coordinator::{CoordinatorConfig, KubernetesStateConfig, StateBackendKind, StateConfig};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::kubernetes::{ApiServer, LEASE, LEASES, NAMESPACE, leader_of, take_over};
use crate::port::free_port;
use crate::suite::SharedState;
use crate::support::{call, config};

/// A server over plain HTTP, on a runtime of its own, so that it can die without a word.
pub(crate) struct SmallApiServer {
    objects: Arc<Mutex<Objects>>,
    runtime: Option<Runtime>,
    port: u16,
    url: String,
}

/// All objects by path, and the version of the last write.
#[derive(Default)]
struct Objects {
    by_path: BTreeMap<String, Value>,
    version: u64,
}

impl SharedState for SmallApiServer {
    const REPLACED_WITHIN: Duration = Duration::from_secs(15);
    const CAMPAIGN_PATH: &str = LEASES;

    async fn start() -> Self {
        let port = free_port();
        let url = format!("http://127.0.0.1:{port}");
        let mut server = Self { objects: Arc::default(), runtime: None, port, url };
        server.restart().await;
        server
    }

    fn url(&self) -> &str {
        &self.url
    }

    fn config(&self) -> CoordinatorConfig {
        config_with(&self.url, KubernetesStateConfig::default().lease_duration_s)
    }

    fn config_at(&self, url: &str) -> CoordinatorConfig {
        config_with(url, 60)
    }

    async fn leader(&self) -> Option<String> {
        leader_of(self.objects.lock().by_path.get(LEASE)?)
    }

    async fn remove_leader(&self) {
        take_over(self).await;
    }

    fn kill(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }

    async fn restart(&mut self) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let router = Router::new().fallback(serve).with_state(Arc::clone(&self.objects));
        let port = self.port;
        let listening = runtime.spawn(async move {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            // Connections that were killed may still be there.
            socket.set_reuseaddr(true).unwrap();
            socket.bind(([127, 0, 0, 1], port).into()).unwrap();
            socket.listen(128).unwrap()
        });
        let listener = listening.await.unwrap();
        runtime.spawn(async move { axum::serve(listener, router).await });
        self.runtime = Some(runtime);
    }
}

impl ApiServer for SmallApiServer {
    async fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> (u16, Value) {
        let body = body.map(Value::to_string).unwrap_or_default();
        call(method.as_str(), &format!("{}{path}", self.url), &body).await.unwrap()
    }
}

impl Drop for SmallApiServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn serve(
    State(objects): State<Arc<Mutex<Objects>>>,
    method: Method,
    uri: Uri,
    body: Bytes,
) -> impl IntoResponse {
    let (status, object) = objects.lock().handle(&method, uri.path(), &body);
    (status, object.to_string())
}

impl Objects {
    fn handle(&mut self, method: &Method, path: &str, body: &[u8]) -> (StatusCode, Value) {
        let refused = |status: StatusCode| (status, json!({ "kind": "Status", "code": status.as_u16() }));
        let known = self.by_path.get(path);
        match *method {
            Method::GET => {
                known.map_or(refused(StatusCode::NOT_FOUND), |known| (StatusCode::OK, known.clone()))
            }
            Method::DELETE => match self.by_path.remove(path) {
                Some(object) => (StatusCode::OK, object),
                None => refused(StatusCode::NOT_FOUND),
            },
            Method::POST => {
                let object: Value = serde_json::from_slice(body).unwrap();
                let path = format!("{path}/{}", object["metadata"]["name"].as_str().unwrap());
                if self.by_path.contains_key(&path) {
                    return refused(StatusCode::CONFLICT);
                }
                (StatusCode::CREATED, self.put(path, object))
            }
            Method::PUT => {
                let object: Value = serde_json::from_slice(body).unwrap();
                match known {
                    None => refused(StatusCode::NOT_FOUND),
                    Some(known)
                        if known["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] =>
                    {
                        refused(StatusCode::CONFLICT)
                    }
                    Some(_) => (StatusCode::OK, self.put(path.to_owned(), object)),
                }
            }
            _ => refused(StatusCode::METHOD_NOT_ALLOWED),
        }
    }

    fn put(&mut self, path: String, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.by_path.insert(path, object.clone());
        object
    }
}

fn config_with(url: &str, lease_duration_s: u64) -> CoordinatorConfig {
    let kubernetes = KubernetesStateConfig {
        api: url.to_owned(),
        namespace: Some(NAMESPACE.to_owned()),
        lease_duration_s,
        ..KubernetesStateConfig::default()
    };
    let state = StateConfig { backend: StateBackendKind::Kubernetes, kubernetes, ..StateConfig::default() };
    CoordinatorConfig { state, ..config() }
}
