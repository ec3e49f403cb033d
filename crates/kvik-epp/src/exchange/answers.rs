//! The messages that a picker sends.

use std::collections::VecDeque;

use bytes::Bytes;
use http::{HeaderName, HeaderValue as HttpHeaderValue, StatusCode};

use crate::messages::processing_response::Response;
use crate::messages::{
    BodyMutation, BodyResponse, CommonResponse, HeaderAppendAction, HeaderMutation, HeaderValue,
    HeaderValueOption, HeadersResponse, HttpStatus, ImmediateResponse, ProcessingResponse,
    StreamedBodyResponse, Struct, TrailersResponse, value,
};

/// The header and the metadata key that name the endpoints of a request.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// The namespace of metadata by which the data plane's load balancer chooses.
pub const LOAD_BALANCER_NAMESPACE: &str = "envoy.lb";
/// The header that names the engine which computes the prompt, to the sidecar of the engine that generates.
pub const PREFILLER: &str = "x-prefiller-host-port";
/// Headers that direct the sidecars of engines. They are removed from requests, because a client that sets one could direct
/// an engine to any address.
const SIDECAR_HEADERS: [&str; 4] =
    [PREFILLER, "x-encoder-hosts-ports", "x-data-parallel-host-port", "x-kv-cache-source-host-port"];
/// Most bytes of a piece of a body: with what surrounds it a message stays below 64 KiB, which Envoy recommends as the most.
pub const MAX_PIECE_BYTES: usize = 62_000;

/// Where a request goes.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// The endpoint that takes it, then those to try if that fails, each as `host:port`.
    pub endpoints: Vec<String>,
    /// The endpoint that computes the prompt, if that is another one.
    pub prefill_endpoint: Option<String>,
    /// Headers that the worker gets, in place of those of the client.
    pub added_headers: Vec<(HeaderName, HttpHeaderValue)>,
    /// Headers of the client that the worker does not get.
    pub removed_headers: Vec<HeaderName>,
}

/// An answer to a client whose request gets no worker.
#[derive(Debug, Clone, Default)]
pub struct Refusal {
    /// Its status.
    pub status: StatusCode,
    /// In one word.
    pub reason: &'static str,
    /// Its headers.
    pub headers: http::HeaderMap,
    /// Its body.
    pub body: Bytes,
}

impl Choice {
    /// The header mutation that names the chosen endpoints, and the dynamic metadata with the same value for the load balancer.
    /// `n_body_bytes` is the length of the body; `None` for a request without one.
    pub(super) fn head(&self, n_body_bytes: Option<usize>) -> (CommonResponse, Struct) {
        let endpoints = self.endpoints.join(",");
        let mut set_headers = vec![set_header(DESTINATION, Bytes::from(endpoints.clone()))];
        set_headers
            .extend(n_body_bytes.map(|n_bytes| set_header("content-length", n_bytes.to_string().into())));
        set_headers.extend(
            self.prefill_endpoint.as_ref().map(|endpoint| set_header(PREFILLER, endpoint.clone().into())),
        );
        for (name, value) in &self.added_headers {
            set_headers.push(set_header(name.as_str(), Bytes::copy_from_slice(value.as_bytes())));
        }
        let is_removed = |name: &&&str| self.prefill_endpoint.is_none() || **name != PREFILLER;
        let sidecar_headers = SIDECAR_HEADERS.iter().filter(is_removed).map(|name| (*name).to_owned());
        let removed_headers = self.removed_headers.iter().map(|name| name.as_str().to_owned());
        let remove_headers = sidecar_headers.chain(removed_headers).collect();
        let common = CommonResponse {
            header_mutation: Some(HeaderMutation { set_headers, remove_headers }),
            body_mutation: None,
            // A route may be chosen by what the headers say.
            clear_route_cache: true,
        };
        let balancer = Struct::with(DESTINATION, value::Kind::Text(endpoints));
        (common, Struct::with(LOAD_BALANCER_NAMESPACE, value::Kind::Struct(balancer)))
    }
}

impl Refusal {
    pub(super) fn message(&self) -> ProcessingResponse {
        let set_headers = self
            .headers
            .iter()
            .map(|(name, value)| set_header(name.as_str(), Bytes::copy_from_slice(value.as_bytes())));
        answer(Response::ImmediateResponse(ImmediateResponse {
            status: Some(HttpStatus { code: self.status.as_u16().into() }),
            headers: Some(HeaderMutation { set_headers: set_headers.collect(), remove_headers: Vec::new() }),
            body: self.body.clone(),
            details: format!("kvik_epp_{}", self.reason),
        }))
    }
}

pub(super) fn answer(response: Response) -> ProcessingResponse {
    ProcessingResponse { response: Some(response), dynamic_metadata: None }
}

/// Which body a piece belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Request,
    Answer,
}

impl Side {
    /// A body with what is said about it, and about the head where that waits for the body.
    pub(super) fn body(self, response: CommonResponse) -> ProcessingResponse {
        let body = BodyResponse { response: Some(response) };
        answer(match self {
            Self::Request => Response::RequestBody(body),
            Self::Answer => Response::ResponseBody(body),
        })
    }

    /// A body in pieces, at least one; the last one says so if `is_last`.
    pub(super) fn pieces(self, body: &Bytes, is_last: bool, answers: &mut VecDeque<ProcessingResponse>) {
        let mut start = 0;
        loop {
            let end = body.len().min(start + MAX_PIECE_BYTES);
            let end_of_stream = is_last && end == body.len();
            let piece = StreamedBodyResponse { body: body.slice(start..end), end_of_stream };
            let body_mutation = Some(BodyMutation { streamed_response: Some(piece) });
            answers.push_back(self.body(CommonResponse { body_mutation, ..CommonResponse::default() }));
            if end == body.len() {
                return;
            }
            start = end;
        }
    }

    /// A head.
    pub(super) fn head(self, response: CommonResponse) -> ProcessingResponse {
        let head = HeadersResponse { response: Some(response) };
        answer(match self {
            Self::Request => Response::RequestHeaders(head),
            Self::Answer => Response::ResponseHeaders(head),
        })
    }

    /// Trailers, which stay as they are.
    pub(super) fn trailers(self) -> ProcessingResponse {
        answer(match self {
            Self::Request => Response::RequestTrailers(TrailersResponse {}),
            Self::Answer => Response::ResponseTrailers(TrailersResponse {}),
        })
    }
}

/// A header that replaces those of its name. Its value is in the field for bytes: Envoy passes over the one for text where both
/// kinds are possible.
pub(super) fn set_header(name: &str, value: Bytes) -> HeaderValueOption {
    let header = HeaderValue { key: name.to_owned(), value: String::new(), raw_value: value };
    let append_action = HeaderAppendAction::OverwriteIfExistsOrAdd.into();
    HeaderValueOption { header: Some(header), append_action }
}
