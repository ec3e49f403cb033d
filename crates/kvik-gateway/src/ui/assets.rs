//! The files of the page, which the binary carries.
//!
//! A file is served with a digest of its bytes as its `ETag` and is asked for again each time, so that a page never
//! mixes files of two versions. The content security policy lets the page load from its own gateway alone and run no script
//! or style that is not one of these files.

use axum::body::Body;
use axum::extract::Path;
use axum::response::{IntoResponse as _, Response};
use http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, LOCATION,
    REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use xxhash_rust::xxh3::xxh3_64;

use crate::answer::refuse;
use crate::error::Refusal;

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    form-action 'none'; base-uri 'none'; frame-ancestors 'none'";

/// Headers of every file.
const HEADERS: [(HeaderName, &str); 5] = [
    (CACHE_CONTROL, "no-cache"),
    (CONTENT_SECURITY_POLICY, POLICY),
    (REFERRER_POLICY, "no-referrer"),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

/// A file of the page.
struct Asset {
    name: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
}

/// The file of this name in `ui/`.
macro_rules! asset {
    ($name:literal, $kind:literal) => {
        Asset { name: $name, kind: $kind, bytes: include_bytes!(concat!("../../ui/", $name)) }
    };
}

const INDEX: &str = "index.html";

const ASSETS: &[Asset] = &[
    asset!("index.html", "text/html; charset=utf-8"),
    asset!("style.css", "text/css; charset=utf-8"),
    asset!("icon.svg", "image/svg+xml"),
    asset!("app.js", "text/javascript; charset=utf-8"),
    asset!("api.js", "text/javascript; charset=utf-8"),
    asset!("live.js", "text/javascript; charset=utf-8"),
    asset!("dom.js", "text/javascript; charset=utf-8"),
    asset!("format.js", "text/javascript; charset=utf-8"),
    asset!("chart.js", "text/javascript; charset=utf-8"),
    asset!("dialog.js", "text/javascript; charset=utf-8"),
    asset!("fleet.js", "text/javascript; charset=utf-8"),
    asset!("activity.js", "text/javascript; charset=utf-8"),
    asset!("worker.js", "text/javascript; charset=utf-8"),
    asset!("inspector.js", "text/javascript; charset=utf-8"),
    asset!("blocks.js", "text/javascript; charset=utf-8"),
    asset!("playground.js", "text/javascript; charset=utf-8"),
    asset!("series.js", "text/javascript; charset=utf-8"),
    asset!("memory.js", "text/javascript; charset=utf-8"),
];

/// `GET /`: leads browsers to the page; to programs there is nothing here.
pub(super) async fn root(headers: HeaderMap) -> Response {
    let is_browser = headers
        .get_all(ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .any(|kinds| kinds.contains("text/html"));
    if is_browser { lead_to("ui/") } else { refuse(Refusal::unknown_route()) }
}

/// `GET /ui`: the page's files are named relative to a folder.
pub(super) async fn folder() -> Response {
    lead_to("ui/")
}

/// `GET /ui/`.
pub(super) async fn index(headers: HeaderMap) -> Response {
    serve(INDEX, &headers)
}

/// `GET /ui/{file}`.
pub(super) async fn file(Path(name): Path<String>, headers: HeaderMap) -> Response {
    serve(&name, &headers)
}

fn serve(name: &str, headers: &HeaderMap) -> Response {
    let Some(asset) = ASSETS.iter().find(|asset| asset.name == name) else {
        return refuse(Refusal::unknown_route());
    };
    let tag = format!("\"{:016x}\"", xxh3_64(asset.bytes));
    let known = headers.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let is_known = known.flat_map(|tags| tags.split(',')).any(|known| known.trim() == tag);
    let mut response = if is_known {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        Response::new(Body::from(asset.bytes))
    };
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(asset.kind));
    headers.extend(HEADERS.map(|(name, value)| (name, HeaderValue::from_static(value))));
    headers.extend(HeaderValue::from_str(&tag).ok().map(|tag| (ETAG, tag)));
    response
}

/// The address is relative: a proxy may serve the gateway below a path of its own.
fn lead_to(place: &'static str) -> Response {
    (StatusCode::TEMPORARY_REDIRECT, [(LOCATION, place)]).into_response()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    fn text(asset: &Asset) -> &'static str {
        std::str::from_utf8(asset.bytes).unwrap()
    }

    #[test]
    fn every_file_of_the_folder_is_served_and_no_other() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("ui");
        let files = std::fs::read_dir(folder).unwrap();
        let files: BTreeSet<String> =
            files.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        let served: BTreeSet<String> = ASSETS.iter().map(|asset| asset.name.to_owned()).collect();
        assert_eq!(files, served);
    }

    #[test]
    fn modules_import_files_that_are_served() {
        for asset in ASSETS.iter().filter(|asset| asset.kind.starts_with("text/javascript")) {
            for line in text(asset).lines().filter(|line| line.contains(" from \"")) {
                let name = line.split("from \"./").nth(1).and_then(|rest| rest.split('"').next());
                assert!(
                    name.is_some_and(|name| ASSETS.iter().any(|asset| asset.name == name)),
                    "{}: {line}",
                    asset.name
                );
            }
        }
    }

    #[test]
    fn the_page_needs_nothing_that_its_policy_forbids() {
        for asset in ASSETS {
            for forbidden in
                ["https://", "style=\"", "<style", "onclick=", "javascript:", "eval(", "innerHTML"]
            {
                assert!(!text(asset).contains(forbidden), "{}: {forbidden}", asset.name);
            }
            let addresses = text(asset).matches("http://").count();
            let namespaces = text(asset).matches("http://www.w3.org/").count();
            assert_eq!(addresses, namespaces, "{} names another host", asset.name);
        }
        assert_eq!(text(&ASSETS[0]).matches("<script").count(), 1);
    }
}
