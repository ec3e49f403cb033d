//! Keeps pages of other sites from calling the gateway in the name of the browser's user.
//!
//! Where no token is set, callers on loopback are administrators, and every page that a browser on this machine shows is on
//! loopback. A browser says which site a call comes from, and calls with a token cannot be made by another site. What is left
//! is a name of the attacker that leads to 127.0.0.1: a call without a token must be addressed to `localhost` or an IP address.

use std::net::IpAddr;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use http::header::{HOST, ORIGIN};
use http::{HeaderMap, Uri};
use kvik_runtime::trust::TOKEN_HEADER;

use crate::answer::refuse;
use crate::error::Refusal;

/// Serves the routes that `router` has by now to programs and to the gateway's own page.
pub(crate) fn only<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    router.route_layer(from_fn(async |request: Request, next: Next| {
        if is_allowed(request.headers(), request.uri()) {
            next.run(request).await
        } else {
            refuse(Refusal::other_origin())
        }
    }))
}

fn is_allowed(headers: &HeaderMap, uri: &Uri) -> bool {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    if text("sec-fetch-site").is_some_and(|site| site != "same-origin") {
        return false;
    }
    // Another site cannot send this header. Where a proxy has renamed the gateway, host and origin differ rightly.
    if headers.contains_key(TOKEN_HEADER) {
        return true;
    }
    let host = text(HOST.as_str()).or_else(|| uri.authority().map(http::uri::Authority::as_str));
    let Some(host) = host else { return false };
    let is_own = |origin: &str| origin.split_once("://").is_some_and(|(_, authority)| authority == host);
    text(ORIGIN.as_str()).is_none_or(is_own) && is_unnamed(host)
}

/// Whether a host is one that no other site can give a name to.
fn is_unnamed(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(headers: &[(&'static str, &'static str)]) -> bool {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        is_allowed(&headers.collect(), &Uri::from_static("/ui/workers/a/drain"))
    }

    #[test]
    fn programs_and_the_own_page_are_served() {
        for host in ["127.0.0.1:8080", "localhost:8080", "[::1]:8080", "[::1]", "10.0.0.7"] {
            assert!(allowed(&[("host", host)]), "{host}");
        }
        assert!(allowed(&[
            ("host", "localhost:8080"),
            ("origin", "http://localhost:8080"),
            ("sec-fetch-site", "same-origin"),
        ]));
        assert!(allowed(&[
            ("host", "127.0.0.1:8080"),
            ("origin", "https://gw.example"),
            ("x-kvik-cluster-token", "t"),
        ]));
    }

    #[test]
    fn pages_of_other_sites_are_not() {
        for headers in [
            &[("host", "localhost:8080"), ("sec-fetch-site", "cross-site")][..],
            &[("host", "localhost:8080"), ("sec-fetch-site", "same-site")],
            &[("host", "localhost:8080"), ("sec-fetch-site", "cross-site"), ("x-kvik-cluster-token", "t")],
            &[("host", "localhost:8080"), ("origin", "http://localhost:9090")],
            &[("host", "localhost:8080"), ("origin", "null")],
            &[("host", "attacker.example:8080"), ("origin", "http://attacker.example:8080")],
            &[("host", "127.0.0.1.attacker.example")],
            &[],
        ] {
            assert!(!allowed(headers), "{headers:?}");
        }
    }
}
