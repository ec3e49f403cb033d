//! Files of a hub over HTTP.

use std::time::Duration;

use http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, LOCATION, RANGE};
use http::{Method, StatusCode};
use reqwest::{Client, Response, Url};
use serde::Deserialize;

use super::error::HubError;
use super::repository::{Repository, is_word};
use crate::error::with_causes;
use crate::secret::Secret;

/// Largest list of a repository's files, in bytes; one of ten thousand files has some 2 MB.
const MAX_LISTING_BYTES: usize = 64 << 20;
/// Most redirects of one request.
const MAX_REDIRECTS: usize = 10;
/// Longest part of what the hub says that is repeated, in characters.
const MAX_REASON_CHARS: usize = 200;

/// How long an answer may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeLimit {
    /// For the whole answer.
    Whole(Duration),
    /// From bytes of it to the next ones.
    NextBytes(Duration),
}

/// Asks a hub for files. Follows redirects; only the hub itself gets the token.
#[derive(Debug, Clone)]
pub struct HubClient {
    http: Client,
    base: Url,
    token: Option<Secret>,
}

/// What a repository has at a commit.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) commit: String,
    /// Names of files, with folders.
    pub(super) files: Vec<String>,
}

/// What the hub says of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileInfo {
    /// Names the content: its SHA-256 for large files, git's name of it for others. Can be the name of a file.
    pub(super) etag: String,
    pub(super) n_bytes: u64,
}

/// The bytes of a file, from an offset on.
#[derive(Debug)]
pub(super) struct FileBody {
    pub(super) response: Response,
    /// Where its first byte is; 0 where the server sends the whole file.
    pub(super) offset: u64,
}

#[derive(Deserialize)]
struct ListingAnswer {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl HubClient {
    /// A client of the hub at `url`.
    ///
    /// # Errors
    /// If the address is not one of a hub, or TLS cannot be used.
    pub fn try_new(url: &str, token: Option<Secret>, limit: TimeLimit) -> Result<Self, HubError> {
        let base = Url::parse(url).ok().filter(|_| is_hub_url(url));
        let base = base.ok_or_else(|| HubError::unavailable("read the hub's address", "it is not a URL"))?;
        // The library takes the provider of the process; if there is one already, that is as good.
        drop(rustls::crypto::ring::default_provider().install_default());
        let builder = Client::builder()
            .user_agent(concat!("kvik/", env!("CARGO_PKG_VERSION")))
            // A redirect must not lead to a connection that others can read or change.
            .https_only(base.scheme() == "https")
            // Redirects are followed here: their headers say what the file is.
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(Duration::from_secs(10));
        let builder = match limit {
            TimeLimit::Whole(limit) => builder.timeout(limit),
            TimeLimit::NextBytes(limit) => builder.read_timeout(limit),
        };
        let http = builder
            .build()
            .map_err(|error| HubError::unavailable("make a client for the hub", with_causes(&error)))?;
        Ok(Self { http, base, token })
    }

    /// The whole of a file of at most `max_bytes`; `None` if the repository does not have it.
    ///
    /// # Errors
    /// If the hub refuses, or the file is larger or ends early.
    pub async fn small_file(
        &self,
        repository: &Repository,
        file: &str,
        max_bytes: usize,
    ) -> Result<Option<Vec<u8>>, HubError> {
        let url = self.file_url(repository.name(), repository.revision(), file);
        let response = self.get(url, None).await?;
        match response.status() {
            StatusCode::OK => whole(response, max_bytes).await.map(Some),
            StatusCode::NOT_FOUND => Ok(None),
            _ => Err(self.refusal(repository, &response)),
        }
    }

    /// The files of a repository, at the commit that its revision names now.
    pub(super) async fn list(&self, repository: &Repository) -> Result<Listing, HubError> {
        let path = format!("api/models/{}/revision/{}", repository.name(), repository.revision());
        let response = self.get(self.url(&path), None).await?;
        if response.status() != StatusCode::OK {
            return Err(self.refusal(repository, &response));
        }
        let bytes = whole(response, MAX_LISTING_BYTES).await?;
        let answer: ListingAnswer = serde_json::from_slice(&bytes)
            .map_err(|error| HubError::unavailable("read the hub's list of files", error))?;
        if !is_word(&answer.sha) {
            return Err(HubError::unavailable("read the hub's list of files", "its commit is not a name"));
        }
        let files = answer.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        Ok(Listing { commit: answer.sha, files })
    }

    /// What the hub says of a file.
    pub(super) async fn file_info(
        &self,
        repository: &Repository,
        commit: &str,
        file: &str,
    ) -> Result<FileInfo, HubError> {
        let mut url = self.file_url(repository.name(), commit, file);
        let (mut linked, mut plain) = ((None, None), (None, None));
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send(Method::HEAD, &url, None).await?;
            let headers = response.headers();
            linked.0 = linked.0.or_else(|| etag(headers, "x-linked-etag"));
            linked.1 = linked.1.or_else(|| number(headers, "x-linked-size"));
            // The size of a redirect is that of its own text.
            if response.status().is_success() {
                plain = (etag(headers, ETAG.as_str()), number(headers, CONTENT_LENGTH.as_str()));
            }
            let next = redirect(&response, &url)?;
            // A redirect elsewhere leads to bytes of which the hub has said all; its own lead to another name of the file.
            match next {
                Some(next) if next.origin() == self.base.origin() => url = next,
                Some(_) => break,
                None if response.status().is_success() => break,
                None => return Err(self.refusal(repository, &response)),
            }
        }
        let (Some(etag), Some(n_bytes)) = (linked.0.or(plain.0), linked.1.or(plain.1)) else {
            let reason = format!("it tells no usable ETag and size of {file}");
            return Err(HubError::unavailable("ask the hub", reason));
        };
        Ok(FileInfo { etag, n_bytes })
    }

    /// The bytes of a file from `offset` on; from its beginning if the server gives no parts.
    pub(super) async fn file_body(
        &self,
        repository: &Repository,
        commit: &str,
        file: &str,
        offset: u64,
    ) -> Result<FileBody, HubError> {
        let url = self.file_url(repository.name(), commit, file);
        let response = self.get(url, Some(offset).filter(|&offset| 0 < offset)).await?;
        match response.status() {
            StatusCode::OK => Ok(FileBody { response, offset: 0 }),
            StatusCode::PARTIAL_CONTENT if first_byte(response.headers()) == Some(offset) => {
                Ok(FileBody { response, offset })
            }
            StatusCode::PARTIAL_CONTENT => Err(HubError::unavailable(
                "read from the hub",
                format!("another part of {file} than asked for"),
            )),
            _ => Err(self.refusal(repository, &response)),
        }
    }

    fn file_url(&self, name: &str, revision: &str, file: &str) -> Url {
        self.url(&format!("{name}/resolve/{revision}/{file}"))
    }

    /// An address below the hub's; `path` has only characters that stand for themselves.
    fn url(&self, path: &str) -> Url {
        let mut url = self.base.clone();
        url.set_path(&format!("{}/{path}", self.base.path().trim_end_matches('/')));
        url
    }

    /// Asks until the answer is not a redirect.
    async fn get(&self, mut url: Url, offset: Option<u64>) -> Result<Response, HubError> {
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send(Method::GET, &url, offset).await?;
            match redirect(&response, &url)? {
                Some(next) => url = next,
                None => return Ok(response),
            }
        }
        Err(HubError::unavailable("ask the hub", format!("more than {MAX_REDIRECTS} redirects")))
    }

    async fn send(&self, method: Method, url: &Url, offset: Option<u64>) -> Result<Response, HubError> {
        // A compressed answer has another size than the file.
        let mut request = self.http.request(method, url.clone()).header(ACCEPT_ENCODING, "identity");
        if let Some(token) = self.token.as_ref().filter(|_| url.origin() == self.base.origin()) {
            request = request.bearer_auth(token.expose());
        }
        if let Some(offset) = offset {
            request = request.header(RANGE, format!("bytes={offset}-"));
        }
        // Without its address, which may carry a signature.
        let sent = request.send().await;
        sent.map_err(|error| HubError::unavailable("reach the hub", with_causes(&error.without_url())))
    }

    /// The error of an answer that is no success.
    fn refusal(&self, repository: &Repository, response: &Response) -> HubError {
        let (name, status) = (repository.to_string(), response.status());
        let hub = self.base.as_str().trim_end_matches('/').to_owned();
        let said = response.headers().get("x-error-message").and_then(|value| value.to_str().ok());
        let said = said.unwrap_or_default().chars().take(MAX_REASON_CHARS).collect::<String>();
        match status {
            StatusCode::UNAUTHORIZED => HubError::Unauthorized { name, hub },
            StatusCode::FORBIDDEN => {
                HubError::Forbidden { name, hub, repository: repository.name().to_owned() }
            }
            StatusCode::NOT_FOUND => {
                let reason = if said.is_empty() { "not found".to_owned() } else { said };
                HubError::NotFound { name, hub, reason }
            }
            status => HubError::unavailable("ask the hub", format!("{status} for {name} {said}").trim_end()),
        }
    }
}

/// Whether a text can be the address of a hub.
pub(super) fn is_hub_url(url: &str) -> bool {
    (url.starts_with("https://") || url.starts_with("http://")) && !url.contains('@')
}

/// Where a redirect leads; `None` for another answer.
fn redirect(response: &Response, from: &Url) -> Result<Option<Url>, HubError> {
    if !response.status().is_redirection() {
        return Ok(None);
    }
    let location = response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
    let next = location.and_then(|location| from.join(location).ok());
    next.map(Some).ok_or_else(|| HubError::unavailable("ask the hub", "a redirect that leads nowhere"))
}

/// The body of an answer.
async fn whole(mut response: Response, max_bytes: usize) -> Result<Vec<u8>, HubError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = next_chunk(&mut response).await? {
        if bytes.len() + chunk.len() > max_bytes {
            return Err(HubError::unavailable(
                "read from the hub",
                format!("a file of more than {max_bytes} bytes"),
            ));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// The next bytes of an answer; `None` at its end.
pub(super) async fn next_chunk(response: &mut Response) -> Result<Option<bytes::Bytes>, HubError> {
    let chunk = response.chunk().await;
    chunk.map_err(|error| HubError::unavailable("read from the hub", with_causes(&error.without_url())))
}

/// An `ETag` without its marks, if it can be the name of a file.
fn etag(headers: &HeaderMap, name: &str) -> Option<String> {
    let text = headers.get(name)?.to_str().ok()?;
    let text = text.strip_prefix("W/").unwrap_or(text).trim_matches('"');
    is_word(text).then(|| text.to_owned())
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}

/// The place of the first byte of a part: `bytes 5-9/10` begins at 5.
fn first_byte(headers: &HeaderMap) -> Option<u64> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    text.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok()
}
