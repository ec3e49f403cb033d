//! The two requests that are made of an API server: list and watch.

use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use http::header::{ACCEPT, AUTHORIZATION};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use kvik_proto::client::{HttpClient, TlsClientConfig, http_client};
use kvik_runtime::error::with_causes;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::time::timeout;

/// Time for the head of an answer, and for the whole of a list.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a watch may last before the server ends it.
const WATCH_S: u64 = 240;
/// Silence after which a watch is given up: the server should have ended it.
const WATCH_SILENCE: Duration = Duration::from_secs(WATCH_S + 30);
/// Objects of one page of a list.
const PAGE_OBJECTS: usize = 500;
/// Pages of a list; 10 000 pods, or slices of 100 endpoints, are beyond what one service has.
const MAX_PAGES: usize = 20;
/// Longest page: one slice has at most 1000 endpoints, some 300 kB; a pod has some 10 kB.
const MAX_PAGE_BYTES: usize = 64 << 20;
/// Longest line of a watch, which is one object.
const MAX_LINE_BYTES: usize = 4 << 20;

/// Why a request is of no use.
#[derive(Debug)]
pub enum ApiError {
    /// The version is no longer known: list again.
    Gone,
    /// Anything else: wait, then list again.
    Failed(String),
}

/// How an API server is reached.
#[derive(Debug, Clone)]
pub struct ApiAccess {
    /// Its base address.
    pub api: String,
    /// File with the token that is shown to it, read anew for each request.
    pub token_file: PathBuf,
    /// File with the authorities that sign its certificate, read anew for each request.
    pub ca_file: PathBuf,
}

/// Objects of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resource {
    /// Such as `/api/v1/namespaces/default/pods`.
    path: String,
    /// The selector, encoded.
    query: String,
}

/// An API server.
#[derive(Debug)]
pub struct Api {
    access: ApiAccess,
    /// The authorities' file as it was read, and the client that trusts them.
    client: Option<(Vec<u8>, HttpClient)>,
}

/// A stream of changes.
#[derive(Debug)]
pub struct Watch<T> {
    body: Incoming,
    lines: Lines,
    kind: PhantomData<fn() -> T>,
}

/// What every object says of itself.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectMeta {
    /// Its name, which no other object of its kind and namespace has.
    #[serde(default)]
    pub name: String,
    /// Its version; a watch goes on from one.
    #[serde(default)]
    pub resource_version: String,
}

/// One change.
#[derive(Debug)]
pub enum Change<T> {
    /// An object is new or other than before.
    Put(T),
    /// An object is gone.
    Delete(T),
    /// Nothing has changed up to this version.
    Bookmark(ObjectMeta),
}

/// Cuts a stream into lines.
#[derive(Debug, Default)]
struct Lines {
    buffer: BytesMut,
    /// Bytes in which no line ends.
    n_searched: usize,
}

#[derive(Deserialize)]
struct Page<T> {
    metadata: ListMeta,
    items: Option<Vec<T>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    #[serde(default)]
    resource_version: String,
    #[serde(default, rename = "continue")]
    continue_token: String,
}

#[derive(Deserialize)]
struct WatchLine<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct MetaOnly {
    metadata: ObjectMeta,
}

#[derive(Deserialize)]
struct Status {
    code: Option<u16>,
    message: Option<String>,
}

impl Resource {
    /// The objects at `path` with these labels, as `kubectl --selector` takes them.
    pub fn with_labels(path: String, selector: &str) -> Self {
        Self { path, query: format!("labelSelector={}", encoded(selector)) }
    }

    /// The object at `path` with this name.
    pub fn with_name(path: String, name: &str) -> Self {
        Self { path, query: format!("fieldSelector={}", encoded(&format!("metadata.name={name}"))) }
    }
}

impl Api {
    /// A server that has not been asked yet.
    pub fn new(access: ApiAccess) -> Self {
        Self { access, client: None }
    }

    /// All objects of a resource, and the version from which to watch.
    ///
    /// # Errors
    /// As [`ApiError`] says.
    pub async fn list<T: DeserializeOwned>(
        &mut self,
        resource: &Resource,
    ) -> Result<(Vec<T>, String), ApiError> {
        let mut objects = Vec::new();
        let mut query = format!("&limit={PAGE_OBJECTS}");
        for _ in 0..MAX_PAGES {
            let response = self.get(resource, &query).await?;
            let body = Limited::new(response.into_body(), MAX_PAGE_BYTES).collect();
            let body = timeout(ANSWER, body).await.map_err(|_| failed("read a list", &"out of time"))?;
            let body = body.map_err(|error| failed("read a list", &error))?.to_bytes();
            let page: Page<T> =
                serde_json::from_slice(&body).map_err(|error| failed("read a list", &error))?;
            objects.extend(page.items.unwrap_or_default());
            if page.metadata.continue_token.is_empty() {
                return Ok((objects, page.metadata.resource_version));
            }
            query = format!("&limit={PAGE_OBJECTS}&continue={}", encoded(&page.metadata.continue_token));
        }
        Err(failed("read a list", &format!("more than {} objects", MAX_PAGES * PAGE_OBJECTS)))
    }

    /// What changes from a version on.
    ///
    /// # Errors
    /// As [`ApiError`] says.
    pub async fn watch<T: DeserializeOwned>(
        &mut self,
        resource: &Resource,
        version: &str,
    ) -> Result<Watch<T>, ApiError> {
        let version = encoded(version);
        let query =
            format!("&watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_S}&resourceVersion={version}");
        let body = self.get(resource, &query).await?.into_body();
        Ok(Watch { body, lines: Lines::default(), kind: PhantomData })
    }

    async fn get(&mut self, resource: &Resource, query: &str) -> Result<Response<Incoming>, ApiError> {
        let ApiAccess { api, token_file, ca_file } = &self.access;
        let Resource { path, query: selector } = resource;
        let url = format!("{}{path}?{selector}{query}", api.trim_end_matches('/'));
        let mut request = Request::get(url)
            .header(ACCEPT, "application/json")
            .body(Full::new(Bytes::new()))
            .map_err(|error| failed("make a request", &error))?;
        let is_tls = api.starts_with("https://");
        let mut authorities = Vec::new();
        if is_tls {
            // Kubernetes replaces both files while the pod runs. The token goes nowhere in plain text.
            let (token_file, ca_file) = (token_file.clone(), ca_file.clone());
            let read = move || -> Result<_, String> {
                let with_path = |path: &Path, error| format!("{}: {error}", path.display());
                let token =
                    std::fs::read_to_string(&token_file).map_err(|error| with_path(&token_file, error))?;
                Ok((token, std::fs::read(&ca_file).map_err(|error| with_path(&ca_file, error))?))
            };
            let read =
                tokio::task::spawn_blocking(read).await.map_err(|error| failed("read files", &error))?;
            let (token, ca) = read.map_err(|error| failed("read the token and the authorities", &error))?;
            let mut token = HeaderValue::try_from(format!("Bearer {}", token.trim()))
                .map_err(|error| failed("use the token", &error))?;
            token.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, token);
            authorities = ca;
        }
        let client = self.client(authorities)?;
        let response = timeout(ANSWER, client.request(request)).await;
        let response = response.map_err(|_| failed("reach the API server", &"out of time"))?;
        let response = response.map_err(|error| failed("reach the API server", &with_causes(&error)))?;
        match response.status() {
            StatusCode::OK => Ok(response),
            StatusCode::GONE => Err(ApiError::Gone),
            status => {
                let body = Limited::new(response.into_body(), MAX_LINE_BYTES).collect();
                let body = timeout(ANSWER, body)
                    .await
                    .ok()
                    .and_then(Result::ok)
                    .map(http_body_util::Collected::to_bytes);
                let said = body.and_then(|body| serde_json::from_slice::<Status>(&body).ok());
                let message = said.and_then(|said| said.message).unwrap_or_default();
                Err(failed("ask the API server", &format!("{status} {}", shortened(&message))))
            }
        }
    }

    fn client(&mut self, authorities_pem: Vec<u8>) -> Result<HttpClient, ApiError> {
        if let Some((known, client)) = &self.client
            && *known == authorities_pem
        {
            return Ok(client.clone());
        }
        let tls = TlsClientConfig { authorities_pem: authorities_pem.clone(), identity_pem: None };
        let client = http_client(&tls).map_err(|error| failed("make a client", &error))?;
        self.client = Some((authorities_pem, client.clone()));
        Ok(client)
    }
}

impl<T: DeserializeOwned> Watch<T> {
    /// Waits for the next change; `None` when the server ends the watch, or the connection breaks: the version
    /// to go on from is known. Cancel safe.
    ///
    /// # Errors
    /// As [`ApiError`] says.
    pub async fn next(&mut self) -> Result<Option<Change<T>>, ApiError> {
        loop {
            while let Some(line) = self.lines.next()? {
                if let Some(change) = parse_line(&line)? {
                    return Ok(Some(change));
                }
            }
            match timeout(WATCH_SILENCE, self.body.frame()).await {
                Ok(Some(Ok(frame))) => {
                    if let Some(bytes) = frame.data_ref() {
                        self.lines.buffer.extend_from_slice(bytes);
                    }
                }
                Ok(None | Some(Err(_))) | Err(_) => return Ok(None),
            }
        }
    }
}

impl Lines {
    /// The next line, without its end; `None` if it has not all come.
    fn next(&mut self) -> Result<Option<BytesMut>, ApiError> {
        let Some(place) = memchr::memchr(b'\n', &self.buffer[self.n_searched..]) else {
            self.n_searched = self.buffer.len();
            return if self.buffer.len() > MAX_LINE_BYTES {
                Err(failed("read a watch", &"a line that is too long"))
            } else {
                Ok(None)
            };
        };
        let line = self.buffer.split_to(self.n_searched + place);
        self.buffer.advance(1);
        self.n_searched = 0;
        Ok(Some(line))
    }
}

/// Reads a line of a watch; `None` if it says nothing.
fn parse_line<T: DeserializeOwned>(line: &[u8]) -> Result<Option<Change<T>>, ApiError> {
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    let bad = |error: serde_json::Error| failed("read a watch", &error);
    let WatchLine { kind, object } = serde_json::from_slice(line).map_err(bad)?;
    let object = object.get();
    Ok(match kind {
        "ADDED" | "MODIFIED" => Some(Change::Put(serde_json::from_str(object).map_err(bad)?)),
        "DELETED" => Some(Change::Delete(serde_json::from_str(object).map_err(bad)?)),
        "BOOKMARK" => {
            let bookmark: MetaOnly = serde_json::from_str(object).map_err(bad)?;
            Some(Change::Bookmark(bookmark.metadata))
        }
        "ERROR" => {
            let status: Status = serde_json::from_str(object).map_err(bad)?;
            if status.code == Some(410) {
                return Err(ApiError::Gone);
            }
            return Err(failed("watch", &shortened(&status.message.unwrap_or_default())));
        }
        _ => None,
    })
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

fn failed(what: &str, reason: &dyn std::fmt::Display) -> ApiError {
    ApiError::Failed(format!("{what}: {reason}"))
}

fn shortened(text: &str) -> String {
    text.chars().take(200).collect()
}
