//! Calls to an API server: read, create and replace one object.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use kvik_proto::client::{HttpClient, TlsClientConfig, http_client, send};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::objects::{Lease, MemberMap};
use crate::config::KubernetesStateConfig;
use crate::state::StateError;

/// Longest answer that is read: no object of the API server is larger than 1.5 MiB.
const MAX_ANSWER_BYTES: usize = 4 << 20;

/// A client of an API server, for one namespace.
#[derive(Debug)]
pub(super) struct KubernetesApi {
    config: Arc<KubernetesStateConfig>,
    namespace: String,
    /// The authorities as they were read, and the client that trusts them.
    client: Mutex<Option<(Vec<u8>, HttpClient)>>,
    timeout: Duration,
}

/// Why a call changed nothing, or may have.
#[derive(Debug)]
pub(super) enum Failure {
    /// There is no such object.
    NotFound,
    /// The object is another one than the caller has seen, or exists already.
    Conflict,
    /// Anything else; the call may have been done.
    Other(String),
}

/// A kind of object.
pub(super) trait Resource: Serialize + DeserializeOwned + Send + Sync {
    /// Group and version, as they are in paths.
    const API: &str;
    /// Its name in paths.
    const PLURAL: &str;
}

impl Resource for Lease {
    const API: &str = "apis/coordination.k8s.io/v1";
    const PLURAL: &str = "leases";
}

impl Resource for MemberMap {
    const API: &str = "api/v1";
    const PLURAL: &str = "configmaps";
}

// === impl KubernetesApi ===

impl KubernetesApi {
    pub(super) fn new(config: KubernetesStateConfig, namespace: String, timeout: Duration) -> Self {
        Self { config: Arc::new(config), namespace, client: Mutex::new(None), timeout }
    }

    pub(super) async fn get<T: Resource>(&self, name: &str) -> Result<T, Failure> {
        self.call(Method::GET, &format!("/{name}"), None::<&T>).await
    }

    /// Fails with [`Failure::Conflict`] if there is one of its name.
    pub(super) async fn create<T: Resource>(&self, object: &T) -> Result<T, Failure> {
        self.call(Method::POST, "", Some(object)).await
    }

    /// Replaces an object as it was read; fails with [`Failure::Conflict`] if it has changed since.
    pub(super) async fn replace<T: Resource>(&self, name: &str, object: &T) -> Result<T, Failure> {
        self.call(Method::PUT, &format!("/{name}"), Some(object)).await
    }

    async fn call<T: Resource>(&self, method: Method, path: &str, object: Option<&T>) -> Result<T, Failure> {
        let url = format!(
            "{}/{}/namespaces/{}/{}{path}",
            self.config.api.trim_end_matches('/'),
            T::API,
            self.namespace,
            T::PLURAL,
        );
        let body = object.map(serde_json::to_vec).transpose().map_err(|error| other(&error))?;
        let answer = self.request(method, &url, body.unwrap_or_default());
        let answer = tokio::time::timeout(self.timeout, answer).await;
        match answer {
            Ok(Ok(answer)) => serde_json::from_slice(&answer).map_err(|error| other(&error)),
            Ok(Err(failure)) => Err(failure.at(&url)),
            Err(_) => Err(Failure::Other(format!("{url}: no answer within {} ms", self.timeout.as_millis()))),
        }
    }

    async fn request(&self, method: Method, url: &str, body: Vec<u8>) -> Result<Bytes, Failure> {
        let mut request = Request::builder()
            .method(method)
            .uri(url)
            .header(ACCEPT, "application/json")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| other(&error))?;
        let mut authorities = Vec::new();
        if self.config.api.starts_with("https://") {
            // Kubernetes replaces both files while the pod runs. The token goes nowhere in plain text.
            let config = Arc::clone(&self.config);
            let read = move || Ok((read(&config.token_file)?, read(&config.ca_file)?));
            let read = tokio::task::spawn_blocking(read).await.map_err(|error| other(&error))?;
            let (token, ca) = read.map_err(Failure::Other)?;
            let token = [b"Bearer ", token.trim_ascii()].concat();
            let mut token = HeaderValue::from_bytes(&token).map_err(|error| other(&error))?;
            token.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, token);
            authorities = ca;
        }
        let client = self.client(authorities)?;
        let response = send(&client, request).await.map_err(|error| other(&error))?;
        let status = response.status();
        let answer = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
        let answer = answer.map_err(|error| other(&error))?.to_bytes();
        match status {
            status if status.is_success() => Ok(answer),
            StatusCode::NOT_FOUND => Err(Failure::NotFound),
            StatusCode::CONFLICT => Err(Failure::Conflict),
            status => {
                let shown = String::from_utf8_lossy(&answer[..answer.len().min(200)]);
                Err(Failure::Other(format!("{status}: {shown}")))
            }
        }
    }

    fn client(&self, authorities_pem: Vec<u8>) -> Result<HttpClient, Failure> {
        let mut held = self.client.lock();
        if let Some((known, client)) = &*held
            && *known == authorities_pem
        {
            return Ok(client.clone());
        }
        let config = TlsClientConfig { authorities_pem: authorities_pem.clone(), identity_pem: None };
        let client = http_client(&config).map_err(|error| other(&error))?;
        *held = Some((authorities_pem, client.clone()));
        Ok(client)
    }
}

// === impl Failure ===

impl Failure {
    fn at(self, url: &str) -> Self {
        match self {
            Self::Other(reason) => Self::Other(format!("{url}: {reason}")),
            failure => failure,
        }
    }
}

impl From<Failure> for StateError {
    fn from(failure: Failure) -> Self {
        Self::Unavailable(match failure {
            Failure::NotFound => "the object is gone".to_owned(),
            Failure::Conflict => "the object was changed by others again and again".to_owned(),
            Failure::Other(reason) => reason,
        })
    }
}

fn other(error: &dyn std::fmt::Display) -> Failure {
    Failure::Other(error.to_string())
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("read {}: {error}", path.display()))
}
