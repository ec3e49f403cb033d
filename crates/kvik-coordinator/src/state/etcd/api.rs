//! Calls to etcd through its JSON gateway, which every member serves beside gRPC.
//!
//! The gateway writes 64-bit numbers as strings, keys and values in base64, and leaves out what is
//! zero. JSON over the HTTP client that is here anyway needs no protobuf compiler to build kvik.
//!
//! An etcd that asks for a user gives tokens for its password. A token ends after some minutes, or
//! with the member that gave it; a call that is refused for its token gets a new one and is made
//! once more.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use kvik_proto::client::{HttpClient, send};
use parking_lot::Mutex;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use crate::state::StateError;

/// Longest answer that is read, in bytes: the records of ten thousand workers are a few megabytes.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// A client of an etcd cluster.
#[derive(Debug)]
pub(super) struct EtcdApi {
    http: HttpClient,
    endpoints: Vec<String>,
    credentials: Option<Credentials>,
    /// Of the credentials; `None` before the first call and after an answer that refused it.
    token: Mutex<Option<HeaderValue>>,
    /// The endpoint that answered last.
    preferred: AtomicUsize,
    timeout: Duration,
}

/// A user of etcd.
pub(super) struct Credentials {
    name: String,
    password: String,
}

/// Why a call was not answered.
enum Failure {
    /// The token is missing or over.
    Unauthenticated(String),
    Other(String),
}

/// A session: a lease of etcd, which ends unless it is renewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(super) struct EtcdSession {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) id: i64,
    /// Seconds it lives from now; 0 if it is over.
    #[serde(rename = "TTL", default, deserialize_with = "number")]
    pub(super) ttl_s: i64,
}

/// A key and its value.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct KeyValue {
    #[serde(deserialize_with = "binary")]
    pub(super) value: Vec<u8>,
    #[serde(default, deserialize_with = "number", alias = "createRevision")]
    pub(super) create_revision: i64,
    #[serde(default, deserialize_with = "number", rename = "lease")]
    pub(super) session: i64,
}

/// The answer to a transaction.
#[derive(Debug, Deserialize)]
pub(super) struct TxnAnswer {
    header: Header,
    #[serde(default)]
    pub(super) succeeded: bool,
    #[serde(default)]
    responses: Vec<TxnResponse>,
}

#[derive(Debug, Deserialize)]
struct Header {
    #[serde(deserialize_with = "number")]
    revision: i64,
}

#[derive(Debug, Deserialize)]
struct TxnResponse {
    #[serde(alias = "responseRange")]
    response_range: Option<RangeAnswer>,
}

#[derive(Debug, Deserialize)]
struct RangeAnswer {
    #[serde(default)]
    kvs: Vec<KeyValue>,
}

#[derive(Deserialize)]
struct AuthenticateAnswer {
    token: String,
}

/// An answer of a call that could stream.
#[derive(Debug, Deserialize)]
struct Streamed<T> {
    result: T,
}

// === impl EtcdApi ===

impl EtcdApi {
    pub(super) fn new(
        http: HttpClient,
        endpoints: &[String],
        credentials: Option<Credentials>,
        timeout: Duration,
    ) -> Self {
        let endpoints = endpoints.iter().map(|endpoint| endpoint.trim_end_matches('/').to_owned()).collect();
        Self {
            http,
            endpoints,
            credentials,
            token: Mutex::new(None),
            preferred: AtomicUsize::new(0),
            timeout,
        }
    }

    pub(super) async fn grant(&self, ttl_s: u64) -> Result<EtcdSession, StateError> {
        self.call("/v3/lease/grant", &json!({ "TTL": ttl_s.to_string() })).await
    }

    /// Renews a session; its `ttl_s` is 0 if it was over.
    pub(super) async fn keep_alive(&self, session: i64) -> Result<EtcdSession, StateError> {
        let answer: Streamed<EtcdSession> =
            self.call("/v3/lease/keepalive", &json!({ "ID": session.to_string() })).await?;
        Ok(answer.result)
    }

    /// Ends a session and removes its keys.
    pub(super) async fn revoke(&self, session: i64) -> Result<(), StateError> {
        self.call("/v3/lease/revoke", &json!({ "ID": session.to_string() })).await.map(|_: Value| ())
    }

    pub(super) async fn get(&self, key: &str) -> Result<Option<KeyValue>, StateError> {
        let answer: RangeAnswer = self.call("/v3/kv/range", &json!({ "key": encode(key) })).await?;
        Ok(answer.kvs.into_iter().next())
    }

    /// All keys that begin with `prefix`.
    pub(super) async fn list(&self, prefix: &str) -> Result<Vec<KeyValue>, StateError> {
        // The first key after all that begin with the prefix. It ends with a slash, so there is one.
        let mut end = prefix.as_bytes().to_vec();
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        let body = json!({ "key": encode(prefix), "range_end": STANDARD.encode(end) });
        let answer: RangeAnswer = self.call("/v3/kv/range", &body).await?;
        Ok(answer.kvs)
    }

    /// Does `success` if `key` was created at `revision` (0: does not exist), else reads the key.
    pub(super) async fn txn_if_created_at(
        &self,
        key: &str,
        revision: i64,
        success: &[Value],
    ) -> Result<TxnAnswer, StateError> {
        let body = json!({
            "compare": [{
                "key": encode(key), "target": "CREATE", "result": "EQUAL", "create_revision": revision.to_string(),
            }],
            "success": success,
            "failure": [{ "request_range": { "key": encode(key) } }],
        });
        self.call("/v3/kv/txn", &body).await
    }

    /// Posts `body` to one endpoint after the other until one answers. Callers MUST be content with
    /// a call that happens twice.
    async fn call<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, StateError> {
        let body = Bytes::from(body.to_string());
        // Relaxed: any endpoint will do; this one only is the likeliest to answer.
        let first = self.preferred.load(Ordering::Relaxed);
        let mut failure = String::new();
        for turn in 0..self.endpoints.len() {
            let endpoint_idx = (first + turn) % self.endpoints.len();
            let endpoint = &self.endpoints[endpoint_idx];
            let answer =
                tokio::time::timeout(self.timeout, self.post_as_user(endpoint, path, body.clone())).await;
            match answer.unwrap_or_else(|_| Err(format!("no answer within {} ms", self.timeout.as_millis())))
            {
                Ok(answer) => {
                    self.preferred.store(endpoint_idx, Ordering::Relaxed);
                    return serde_json::from_slice(&answer)
                        .map_err(|error| StateError::Unavailable(format!("{endpoint}{path}: {error}")));
                }
                Err(reason) => failure = format!("{endpoint}{path}: {reason}"),
            }
        }
        Err(StateError::Unavailable(failure))
    }

    /// Posts with a token if there is a user, and once more with a new one if it is over.
    async fn post_as_user(&self, endpoint: &str, path: &str, body: Bytes) -> Result<Bytes, String> {
        let url = format!("{endpoint}{path}");
        let Some(credentials) = &self.credentials else {
            return self.post(&url, body, None).await.map_err(Failure::into_reason);
        };
        let held = self.token.lock().clone();
        if let Some(token) = held {
            match self.post(&url, body.clone(), Some(token)).await {
                Err(Failure::Unauthenticated(_)) => *self.token.lock() = None,
                answered => return answered.map_err(Failure::into_reason),
            }
        }
        let token = self.authenticate(endpoint, credentials).await?;
        *self.token.lock() = Some(token.clone());
        self.post(&url, body, Some(token)).await.map_err(Failure::into_reason)
    }

    async fn authenticate(&self, endpoint: &str, credentials: &Credentials) -> Result<HeaderValue, String> {
        let body = json!({ "name": credentials.name, "password": credentials.password }).to_string();
        let url = format!("{endpoint}/v3/auth/authenticate");
        let answer = self.post(&url, body.into(), None).await.map_err(Failure::into_reason)?;
        let answer: AuthenticateAnswer =
            serde_json::from_slice(&answer).map_err(|error| error.to_string())?;
        let mut token = HeaderValue::try_from(answer.token).map_err(|error| error.to_string())?;
        token.set_sensitive(true);
        Ok(token)
    }

    async fn post(&self, url: &str, body: Bytes, token: Option<HeaderValue>) -> Result<Bytes, Failure> {
        let other = |error: &dyn std::fmt::Display| Failure::Other(error.to_string());
        let mut request = http::Request::post(url)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| other(&error))?;
        if let Some(token) = token {
            request.headers_mut().insert(http::header::AUTHORIZATION, token);
        }
        let response = send(&self.http, request).await.map_err(|error| other(&error))?;
        let status = response.status();
        let answer = Limited::new(response.into_body(), MAX_ANSWER_BYTES)
            .collect()
            .await
            .map_err(|error| other(&error))?
            .to_bytes();
        if status.is_success() {
            return Ok(answer);
        }
        let shown = String::from_utf8_lossy(&answer[..answer.len().min(200)]);
        let reason = format!("{status}: {shown}");
        // Some versions say with 400 that the user is missing.
        if status == StatusCode::UNAUTHORIZED
            || shown.contains("auth token")
            || shown.contains("user name is empty")
        {
            return Err(Failure::Unauthenticated(reason));
        }
        Err(Failure::Other(reason))
    }
}

// === impl Credentials ===

impl Credentials {
    pub(super) fn new(name: &str, password: &str) -> Self {
        Self { name: name.to_owned(), password: password.to_owned() }
    }
}

impl std::fmt::Debug for Credentials {
    /// Tells nothing of the password.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Credentials").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Failure {
    fn into_reason(self) -> String {
        match self {
            Self::Unauthenticated(reason) | Self::Other(reason) => reason,
        }
    }
}

// === impl answers ===

impl TxnAnswer {
    /// The revision of the whole store after the transaction.
    pub(super) fn revision(&self) -> i64 {
        self.header.revision
    }

    /// What was read when the comparison failed.
    pub(super) fn into_key_value(self) -> Option<KeyValue> {
        self.responses.into_iter().find_map(|response| response.response_range?.kvs.into_iter().next())
    }
}

/// The operation that puts a key under a session.
pub(super) fn put(key: &str, value: &[u8], session: i64) -> Value {
    json!({ "request_put": { "key": encode(key), "value": STANDARD.encode(value), "lease": session.to_string() } })
}

/// The operation that removes a key.
pub(super) fn delete(key: &str) -> Value {
    json!({ "request_delete_range": { "key": encode(key) } })
}

fn encode(key: &str) -> String {
    STANDARD.encode(key)
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::String(text) => text.parse().map_err(D::Error::custom),
        value => value.as_i64().ok_or_else(|| D::Error::custom("not a number")),
    }
}

fn binary<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    STANDARD.decode(String::deserialize(deserializer)?).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_etcd_writes_them() {
        let session: Streamed<EtcdSession> = serde_json::from_str(
            r#"{"result":{"header":{"revision":"3","raft_term":"2"},"ID":"4111120007746366469","TTL":"2"}}"#,
        )
        .unwrap();
        assert_eq!(session.result, EtcdSession { id: 4_111_120_007_746_366_469, ttl_s: 2 });
        let over: Streamed<EtcdSession> = serde_json::from_str(r#"{"result":{"ID":"7"}}"#).unwrap();
        assert_eq!(over.result.ttl_s, 0);

        let txn: TxnAnswer = serde_json::from_str(
            r#"{"header":{"revision":"2"},"responses":[{"response_range":{"kvs":[
                {"key":"a3Zpaw==","create_revision":"2","value":"aGVsbG8=","lease":"41"}],"count":"1"}}]}"#,
        )
        .unwrap();
        assert!(!txn.succeeded);
        let key_value = txn.into_key_value().unwrap();
        assert_eq!(
            (key_value.value.as_slice(), key_value.create_revision, key_value.session),
            (&b"hello"[..], 2, 41)
        );
    }
}
