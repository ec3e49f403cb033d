//! What the heads of requests and answers say.

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::exchange::answers::LOAD_BALANCER_NAMESPACE;
use crate::messages::{HttpHeaders, Metadata};

/// The namespace of metadata in which the data plane names the endpoints that may be chosen.
pub const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
/// Their key there.
pub const SUBSET: &str = "x-gateway-destination-endpoint-subset";
/// The key under which the data plane names the endpoint that answered.
pub const SERVED: &str = "x-gateway-destination-endpoint-served";
/// The header by which conformance tests say which endpoints are to be chosen.
pub const TEST_SELECTION: &str = "test-epp-endpoint-selection";

/// The head of a request.
#[derive(Debug, Clone, Default)]
pub(super) struct RequestHead {
    pub(super) path: String,
    pub(super) headers: HeaderMap,
    /// As `content-length` says.
    pub(super) n_announced_bytes: Option<usize>,
}

/// The head of an answer.
#[derive(Debug, Clone, Default)]
pub struct AnswerHead {
    /// Its status; 200 where the data plane does not say.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// The endpoint that it came from, if the data plane says so.
    pub served: Option<String>,
    /// Whether nothing comes behind it.
    pub is_last: bool,
}

impl RequestHead {
    pub(super) fn read(head: &HttpHeaders) -> Self {
        let headers = plain_headers(head);
        let length = headers.get(http::header::CONTENT_LENGTH);
        Self {
            path: pseudo_header(head, ":path").unwrap_or_default(),
            n_announced_bytes: length.and_then(|length| length.to_str().ok()?.trim().parse().ok()),
            headers,
        }
    }

    /// The endpoints that a conformance test asks for.
    pub(super) fn test_selection(&self) -> Vec<String> {
        let names = self.headers.get(TEST_SELECTION).and_then(|names| names.to_str().ok());
        let names = names.unwrap_or_default().split(',').map(str::trim).filter(|name| !name.is_empty());
        names.map(str::to_owned).collect()
    }
}

impl AnswerHead {
    pub(super) fn read(head: &HttpHeaders, metadata: Option<&Metadata>) -> Self {
        let served = metadata.and_then(|metadata| metadata.get(LOAD_BALANCER_NAMESPACE, SERVED));
        let status = pseudo_header(head, ":status").and_then(|status| status.parse().ok());
        Self {
            status: status.unwrap_or_default(),
            headers: plain_headers(head),
            served: served.and_then(|served| served.texts().into_iter().next()),
            is_last: head.end_of_stream,
        }
    }
}

/// The endpoints that may be chosen; `None` if the data plane does not limit them.
pub(super) fn subset(metadata: Option<&Metadata>) -> Option<Vec<String>> {
    Some(metadata?.get(SUBSET_NAMESPACE, SUBSET)?.texts())
}

fn pseudo_header(head: &HttpHeaders, name: &str) -> Option<String> {
    let headers = &head.headers.as_ref()?.headers;
    let header = headers.iter().find(|header| header.key == name)?;
    Some(String::from_utf8_lossy(header.bytes()).into_owned())
}

/// The headers that are not those of HTTP/2; what is no header is passed over, and so is what is beyond the number that a map can have.
fn plain_headers(head: &HttpHeaders) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for header in head.headers.iter().flat_map(|headers| &headers.headers) {
        if header.key.starts_with(':') {
            continue;
        }
        let name = HeaderName::try_from(header.key.as_str());
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(header.bytes()))
            && headers.try_append(name, value).is_err()
        {
            break;
        }
    }
    headers
}
