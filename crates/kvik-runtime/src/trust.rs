//! Which callers a listener serves.
//!
//! Services of one cluster share a token and send it with every call in [`TOKEN_HEADER`]. A second token, that of the
//! administrator, opens the calls that change what a service holds. The rules:
//!
//! - A listener on loopback needs nothing. One that other machines can reach needs the cluster token, client
//!   certificates (mTLS) or the word `insecure`; without any of them the service does not start.
//! - Where there is a cluster token, every call needs it (or the admin token), besides those that are open to all:
//!   health, readiness and metrics.
//! - A call of the administrator needs the admin token where there is one, else the cluster token where there is one.
//!   Where there is neither, it is served to callers on loopback and, with mTLS, to every caller.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde_json::json;
use subtle::ConstantTimeEq as _;

use crate::config::variable;
use crate::error::{Result, RuntimeError};
use crate::http::TlsServerConfig;
use crate::secret::Secret;

/// The header that carries a token. It is kvik's own, so that a client's `Authorization` can pass beside it.
pub const TOKEN_HEADER: HeaderName = HeaderName::from_static("x-kvik-cluster-token");

/// Calls that were refused for their token, by `scope`: `cluster`, `admin`.
const REFUSED_CALLS: &str = "kvik_refused_calls_total";
/// Shortest token: 16 characters of hexadecimal digits are 64 bits.
const MIN_TOKEN_BYTES: usize = 16;
/// Longest token: it must fit into a header.
const MAX_TOKEN_BYTES: usize = 4096;

/// What the configuration of a service says about trust.
#[derive(Debug, Clone, Copy, Default)]
pub struct TrustSettings<'a> {
    /// `cluster_token`.
    pub cluster_token: Option<&'a Secret>,
    /// `cluster_token_file`.
    pub cluster_token_file: Option<&'a Path>,
    /// `admin_token`.
    pub admin_token: Option<&'a Secret>,
    /// `admin_token_file`.
    pub admin_token_file: Option<&'a Path>,
    /// `insecure`.
    pub insecure: bool,
}

/// The tokens of a service, and what its listeners demand.
#[derive(Debug, Clone, Default)]
pub struct Trust {
    cluster_token: Option<Secret>,
    admin_token: Option<Secret>,
    has_mtls: bool,
    has_tls: bool,
    is_insecure: bool,
}

/// What a call may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// What services of a cluster do with each other.
    Cluster,
    /// What changes a service or the KV that it holds, by an operator's decision.
    Admin,
}

/// Why a call is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// It has no token, or a wrong one: 401.
    Unauthenticated(Scope),
    /// It has the cluster token, which does not reach: 403.
    NotAdmin,
    /// There is no token, and the caller is not on loopback: 403.
    NotLoopback,
}

impl TrustSettings<'_> {
    /// Reads the tokens and checks them; `tls` is that of the service's listeners.
    ///
    /// # Errors
    /// If a file cannot be read, a token is given twice, or is none that can be used.
    pub fn read(&self, tls: &TlsServerConfig) -> Result<Trust> {
        let cluster_token = read_token("cluster_token", self.cluster_token, self.cluster_token_file)?;
        let admin_token = read_token("admin_token", self.admin_token, self.admin_token_file)?;
        if admin_token.is_some() && admin_token == cluster_token {
            return Err(invalid("admin_token", "the same as `cluster_token`", "another token, or none"));
        }
        Ok(Trust {
            cluster_token,
            admin_token,
            has_mtls: tls.client_authorities.is_some(),
            has_tls: tls.certificate.is_some(),
            is_insecure: self.insecure,
        })
    }
}

impl Trust {
    /// Whether a listener at `address`, configured as `field`, may serve; `has_keys` says that its clients must show
    /// keys of another kind. Warns where it serves callers from other machines without credentials, and where tokens
    /// go over the network unencrypted.
    ///
    /// # Errors
    /// [`RuntimeError::InvalidField`] if other machines reach it and nothing keeps them out.
    pub fn check_listener(&self, field: &str, address: SocketAddr, has_keys: bool) -> Result<()> {
        if address.ip().to_canonical().is_loopback() {
            return Ok(());
        }
        if self.cluster_token.is_some() || self.has_mtls || has_keys {
            if !self.has_tls {
                tracing::warn!(%address, "tokens and prompts go over the network unencrypted; `tls` encrypts them");
            }
            return Ok(());
        }
        if self.is_insecure {
            tracing::warn!(%address, "insecure: other machines are served without credentials");
            return Ok(());
        }
        let value = format!("{address}, which other machines can reach");
        let allowed = "an address of loopback; any address together with `cluster_token`, `cluster_token_file` or \
            `tls.client_authorities`; or `insecure: true`, which serves every caller";
        Err(invalid(field, &value, allowed))
    }

    /// Whether a call with these headers from `peer` may do what `scope` says.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, headers: &HeaderMap, peer: Option<SocketAddr>, scope: Scope) -> Result<(), Denied> {
        let is_admin = shows(headers, self.admin_token.as_ref());
        let is_member = shows(headers, self.cluster_token.as_ref());
        match (scope, &self.cluster_token, &self.admin_token) {
            (Scope::Cluster, None, _) => Ok(()),
            (Scope::Cluster, Some(_), _) if is_member || is_admin => Ok(()),
            (Scope::Admin, _, Some(_)) if is_admin => Ok(()),
            (Scope::Admin, _, Some(_)) if is_member => Err(Denied::NotAdmin),
            (Scope::Admin, Some(_), None) if is_member => Ok(()),
            (Scope::Admin, None, None) => {
                let is_local = peer.is_some_and(|peer| peer.ip().to_canonical().is_loopback());
                if is_local || self.has_mtls { Ok(()) } else { Err(Denied::NotLoopback) }
            }
            (scope, ..) => Err(Denied::Unauthenticated(scope)),
        }
    }

    /// Whether `headers` show one of the tokens; never where there is none.
    pub fn is_shown_token(&self, headers: &HeaderMap) -> bool {
        shows(headers, self.cluster_token.as_ref()) || shows(headers, self.admin_token.as_ref())
    }

    /// The header for calls to other services of the cluster.
    pub fn cluster_header(&self) -> Option<(HeaderName, HeaderValue)> {
        header(self.cluster_token.as_ref()?)
    }

    /// The header for calls of the administrator.
    pub fn admin_header(&self) -> Option<(HeaderName, HeaderValue)> {
        header(self.admin_token.as_ref().or(self.cluster_token.as_ref())?)
    }

    /// Demands the scope of the cluster for everything that `router` has by now, its fallbacks included, except for
    /// the paths in `open`.
    pub fn members_only<S: Clone + Send + Sync + 'static>(
        self: &Arc<Self>,
        router: Router<S>,
        open: &'static [&'static str],
    ) -> Router<S> {
        let trust = Arc::clone(self);
        router.layer(from_fn(move |request: Request, next: Next| {
            let is_open = open.contains(&request.uri().path());
            let checked = if is_open { Ok(()) } else { trust.check_request(&request, Scope::Cluster) };
            serve(checked, request, next)
        }))
    }

    /// Demands the scope of the administrator for the routes that `router` has by now.
    pub fn admins_only<S: Clone + Send + Sync + 'static>(self: &Arc<Self>, router: Router<S>) -> Router<S> {
        let trust = Arc::clone(self);
        router.route_layer(from_fn(move |request: Request, next: Next| {
            let checked = trust.check_request(&request, Scope::Admin);
            serve(checked, request, next)
        }))
    }

    fn check_request(&self, request: &Request, scope: Scope) -> Result<(), Denied> {
        let peer = request.extensions().get::<SocketAddr>().copied();
        self.check(request.headers(), peer, scope)
    }
}

impl Denied {
    /// The HTTP status.
    pub fn status(self) -> StatusCode {
        match self {
            Self::Unauthenticated(_) => StatusCode::UNAUTHORIZED,
            Self::NotAdmin | Self::NotLoopback => StatusCode::FORBIDDEN,
        }
    }

    /// What the caller can do about it.
    pub fn message(self) -> &'static str {
        match self {
            Self::Unauthenticated(Scope::Cluster) => {
                "this call needs the cluster token, in the header `x-kvik-cluster-token`"
            }
            Self::Unauthenticated(Scope::Admin) => {
                "this call needs the admin token, in the header `x-kvik-cluster-token`"
            }
            Self::NotAdmin => "the cluster token does not allow this call; it needs the admin token",
            Self::NotLoopback => {
                "without `admin_token` or `cluster_token` this call is served to callers on loopback only"
            }
        }
    }

    /// Counts the refused call, and answers it in the form that errors of the `OpenAI` API have.
    pub fn response(self) -> Response {
        let scope = if self == Self::Unauthenticated(Scope::Cluster) { "cluster" } else { "admin" };
        metrics::counter!(REFUSED_CALLS, "scope" => scope).increment(1);
        let code = if self.status() == StatusCode::UNAUTHORIZED { "invalid_token" } else { "forbidden" };
        let error =
            json!({"message": self.message(), "type": "authentication_error", "param": null, "code": code});
        let mut response = Response::new(Body::from(json!({ "error": error }).to_string()));
        *response.status_mut() = self.status();
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response
    }
}

/// The header for a client that is no service: with the token of `file`, else with that of the environment's
/// `KVIK_ADMIN_TOKEN`, `KVIK_ADMIN_TOKEN_FILE`, `KVIK_CLUSTER_TOKEN` or `KVIK_CLUSTER_TOKEN_FILE`, the first that is
/// set; `None` without any.
///
/// # Errors
/// If the file cannot be read, or its token cannot be used.
pub fn client_header(file: Option<&Path>) -> Result<Option<(HeaderName, HeaderValue)>> {
    let token = match file {
        Some(file) => read_token("token", None, Some(file))?,
        None => ["admin_token", "cluster_token"]
            .into_iter()
            .find_map(|field| {
                let name = format!("KVIK_{}", field.to_uppercase());
                let token = variable(&name).map(Secret::from);
                let file = variable(&format!("{name}_FILE")).map(PathBuf::from);
                let is_set = token.is_some() || file.is_some();
                is_set.then(|| read_token(field, token.as_ref(), file.as_deref()))
            })
            .transpose()?
            .flatten(),
    };
    Ok(token.as_ref().and_then(header))
}

async fn serve(checked: Result<(), Denied>, request: Request, next: Next) -> Response {
    match checked {
        Ok(()) => next.run(request).await,
        Err(denied) => denied.response(),
    }
}

/// Whether `headers` show `token`; how long the comparison takes says nothing but whether the lengths differ.
fn shows(headers: &HeaderMap, token: Option<&Secret>) -> bool {
    match (token, headers.get(TOKEN_HEADER)) {
        (Some(token), Some(shown)) => token.expose().as_bytes().ct_eq(shown.as_bytes()).into(),
        _ => false,
    }
}

/// The token of a field that has a second form, a file.
fn read_token(field: &str, token: Option<&Secret>, file: Option<&Path>) -> Result<Option<Secret>> {
    let token = match (token, file) {
        (None, None) => return Ok(None),
        (Some(token), None) => token.clone(),
        (None, Some(path)) => Secret::read(path)?,
        (Some(_), Some(_)) => {
            return Err(invalid(field, &format!("set beside `{field}_file`"), "one of the two"));
        }
    };
    let text = token.expose();
    let fits = (MIN_TOKEN_BYTES..=MAX_TOKEN_BYTES).contains(&text.len());
    if !fits || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        let value = format!("text of {} bytes", text.len());
        return Err(invalid(field, &value, "16 to 4096 printable ASCII characters without spaces"));
    }
    Ok(Some(token))
}

fn header(token: &Secret) -> Option<(HeaderName, HeaderValue)> {
    let mut value = HeaderValue::from_str(token.expose()).ok()?;
    value.set_sensitive(true);
    Some((TOKEN_HEADER, value))
}

fn invalid(field: &str, value: &str, allowed: &str) -> RuntimeError {
    RuntimeError::InvalidField {
        origin: "configuration".to_owned(),
        field: field.to_owned(),
        value: value.to_owned(),
        allowed: allowed.to_owned(),
    }
}

#[cfg(test)]
mod tests;
