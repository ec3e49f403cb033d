//! The messages of `envoy.service.ext_proc.v3`, as far as a picker needs them, written by hand after Envoy's `external_processor.proto`
//! and `base.proto`, so that a build needs no compiler for them.
//!
//! Fields that are not here are passed over when a message is read; a message whose `request` is of an unknown kind has none.

mod metadata;

use std::collections::BTreeMap;

use bytes::Bytes;

pub use metadata::{ListValue, Metadata, Struct, Value, value};

/// The name of the service that data planes call.
pub const PROCESS_SERVICE: &str = "envoy.service.ext_proc.v3.ExternalProcessor";
/// The path of its only call.
pub const PROCESS_PATH: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// What a data plane says about one HTTP request.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProcessingRequest {
    /// The part of the request or of its answer that this is about.
    #[prost(oneof = "processing_request::Request", tags = "2, 3, 4, 5, 6, 7")]
    pub request: Option<processing_request::Request>,
    /// What filters and the route have noted.
    #[prost(message, optional, tag = "8")]
    pub metadata_context: Option<Metadata>,
    /// Whether no answers are read.
    #[prost(bool, tag = "10")]
    pub observability_mode: bool,
    /// How bodies are sent; in the first message only, and not by all data planes.
    #[prost(message, optional, tag = "11")]
    pub protocol_config: Option<ProtocolConfiguration>,
}

/// The parts of [`ProcessingRequest`].
pub mod processing_request {
    use super::{HttpBody, HttpHeaders, HttpTrailers};

    /// A part of a request or of its answer.
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Request {
        /// The head of the request.
        #[prost(message, tag = "2")]
        RequestHeaders(HttpHeaders),
        /// The head of the answer.
        #[prost(message, tag = "3")]
        ResponseHeaders(HttpHeaders),
        /// A piece of the request's body.
        #[prost(message, tag = "4")]
        RequestBody(HttpBody),
        /// A piece of the answer's body.
        #[prost(message, tag = "5")]
        ResponseBody(HttpBody),
        /// The end of the request.
        #[prost(message, tag = "6")]
        RequestTrailers(HttpTrailers),
        /// The end of the answer.
        #[prost(message, tag = "7")]
        ResponseTrailers(HttpTrailers),
    }
}

/// How bodies are sent.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct ProtocolConfiguration {
    /// Of requests.
    #[prost(enumeration = "BodySendMode", tag = "1")]
    pub request_body_mode: i32,
    /// Of answers.
    #[prost(enumeration = "BodySendMode", tag = "2")]
    pub response_body_mode: i32,
}

/// How a body is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum BodySendMode {
    /// Not at all.
    None = 0,
    /// In pieces, each of which waits for its answer.
    Streamed = 1,
    /// In one piece, after the answer to the head.
    Buffered = 2,
    /// As much of it as fits, in one piece.
    BufferedPartial = 3,
    /// In pieces as they come; answers are pieces too, in any number.
    FullDuplexStreamed = 4,
    /// By messages of gRPC.
    Grpc = 5,
}

/// The head of a request or answer.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct HttpHeaders {
    /// The headers, those of HTTP/2 with a colon included.
    #[prost(message, optional, tag = "1")]
    pub headers: Option<HeaderMap>,
    /// Whether there is no body.
    #[prost(bool, tag = "3")]
    pub end_of_stream: bool,
}

/// A piece of a body.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct HttpBody {
    /// The bytes.
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    /// Whether it is the last piece, with no trailers behind it.
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

/// The trailers of a request or answer.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct HttpTrailers {
    /// The trailers.
    #[prost(message, optional, tag = "1")]
    pub trailers: Option<HeaderMap>,
}

/// Headers in their order.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct HeaderMap {
    /// The headers.
    #[prost(message, repeated, tag = "1")]
    pub headers: Vec<HeaderValue>,
}

/// A header.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct HeaderValue {
    /// Its name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Its value, if that is text and [`raw_value`](Self::raw_value) is empty.
    #[prost(string, tag = "2")]
    pub value: String,
    /// Its value.
    #[prost(bytes = "bytes", tag = "3")]
    pub raw_value: Bytes,
}

/// What the picker says.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProcessingResponse {
    /// What is done with a part of the request or of its answer.
    #[prost(oneof = "processing_response::Response", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub response: Option<processing_response::Response>,
    /// What filters and the load balancer of the data plane can read.
    #[prost(message, optional, tag = "8")]
    pub dynamic_metadata: Option<Struct>,
}

/// The parts of [`ProcessingResponse`].
pub mod processing_response {
    use super::{BodyResponse, HeadersResponse, ImmediateResponse, TrailersResponse};

    /// What is done with a part of a request or of its answer.
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Response {
        /// With the head of the request.
        #[prost(message, tag = "1")]
        RequestHeaders(HeadersResponse),
        /// With the head of the answer.
        #[prost(message, tag = "2")]
        ResponseHeaders(HeadersResponse),
        /// With the request's body.
        #[prost(message, tag = "3")]
        RequestBody(BodyResponse),
        /// With the answer's body.
        #[prost(message, tag = "4")]
        ResponseBody(BodyResponse),
        /// With the request's trailers.
        #[prost(message, tag = "5")]
        RequestTrailers(TrailersResponse),
        /// With the answer's trailers.
        #[prost(message, tag = "6")]
        ResponseTrailers(TrailersResponse),
        /// The client is answered now.
        #[prost(message, tag = "7")]
        ImmediateResponse(ImmediateResponse),
    }
}

/// What is done with a head.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct HeadersResponse {
    /// What.
    #[prost(message, optional, tag = "1")]
    pub response: Option<CommonResponse>,
}

/// What is done with a body.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct BodyResponse {
    /// What.
    #[prost(message, optional, tag = "1")]
    pub response: Option<CommonResponse>,
}

/// What is done with trailers: nothing.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct TrailersResponse {}

/// What is done with a head or body.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct CommonResponse {
    /// Headers that are set and taken out.
    #[prost(message, optional, tag = "2")]
    pub header_mutation: Option<HeaderMutation>,
    /// What the body becomes.
    #[prost(message, optional, tag = "3")]
    pub body_mutation: Option<BodyMutation>,
    /// Whether the route is chosen again, by the new headers.
    #[prost(bool, tag = "5")]
    pub clear_route_cache: bool,
}

/// An answer to the client.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ImmediateResponse {
    /// Its status.
    #[prost(message, optional, tag = "1")]
    pub status: Option<HttpStatus>,
    /// Its headers.
    #[prost(message, optional, tag = "2")]
    pub headers: Option<HeaderMutation>,
    /// Its body.
    #[prost(bytes = "bytes", tag = "3")]
    pub body: Bytes,
    /// For the data plane's log.
    #[prost(string, tag = "5")]
    pub details: String,
}

/// A status of HTTP.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct HttpStatus {
    /// Its number.
    #[prost(int32, tag = "1")]
    pub code: i32,
}

/// Headers that are set and taken out.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct HeaderMutation {
    /// Set.
    #[prost(message, repeated, tag = "1")]
    pub set_headers: Vec<HeaderValueOption>,
    /// Taken out.
    #[prost(string, repeated, tag = "2")]
    pub remove_headers: Vec<String>,
}

/// A header that is set.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct HeaderValueOption {
    /// The header.
    #[prost(message, optional, tag = "1")]
    pub header: Option<HeaderValue>,
    /// What becomes of one that is there already.
    #[prost(enumeration = "HeaderAppendAction", tag = "3")]
    pub append_action: i32,
}

/// What becomes of a header that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum HeaderAppendAction {
    /// It gets another value.
    AppendIfExistsOrAdd = 0,
    /// It stays.
    AddIfAbsent = 1,
    /// It is replaced.
    OverwriteIfExistsOrAdd = 2,
    /// It is replaced; one that is not there is not set.
    OverwriteIfExists = 3,
}

/// What a body becomes.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct BodyMutation {
    /// A piece of the new body; of the other kinds none is used.
    #[prost(message, optional, tag = "3")]
    pub streamed_response: Option<StreamedBodyResponse>,
}

/// A piece of a new body.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct StreamedBodyResponse {
    /// The bytes.
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    /// Whether it is the last piece, with no trailers behind it.
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

impl HeaderValue {
    /// Its bytes, wherever they are.
    pub fn bytes(&self) -> &[u8] {
        if self.raw_value.is_empty() { self.value.as_bytes() } else { &self.raw_value }
    }
}

impl Metadata {
    /// A value of a namespace.
    pub fn get(&self, namespace: &str, key: &str) -> Option<&Value> {
        self.filter_metadata.get(namespace)?.fields.get(key)
    }
}

impl Struct {
    /// One field.
    pub fn with(key: &str, value: value::Kind) -> Self {
        let value = Value { kind: Some(value) };
        Self { fields: BTreeMap::from([(key.to_owned(), value)]) }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    /// A field with a length, as Protocol Buffers have them.
    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let mut field = vec![number << 3 | 2, bytes.len() as u8];
        field.extend_from_slice(bytes);
        field
    }

    #[test]
    fn what_later_versions_say_is_passed_over() {
        // Windows of flow control (12, 13), and a part that nothing knows (200).
        let windows = [field(12, &[8, 1]), field(13, &[8, 2]), vec![0xc2, 0x0c, 1, 7]].concat();
        let message = ProcessingRequest::decode(&windows[..]).unwrap();
        assert_eq!(message, ProcessingRequest::default());
        // Beside a part that is known, and inside of it.
        let body = [field(1, b"{}"), vec![2 << 3, 1], vec![4 << 3, 1]].concat();
        let message = ProcessingRequest::decode(&[field(4, &body), windows].concat()[..]).unwrap();
        let body = HttpBody { body: Bytes::from_static(b"{}"), end_of_stream: true };
        assert_eq!(message.request, Some(processing_request::Request::RequestBody(body)));
    }

    #[test]
    fn fields_have_the_numbers_of_the_protocol() {
        let header = HeaderValue { key: "k".to_owned(), value: String::new(), raw_value: "v".into() };
        let set = HeaderValueOption { header: Some(header), append_action: 2 };
        let mutation = HeaderMutation { set_headers: vec![set], remove_headers: vec!["r".to_owned()] };
        let piece = StreamedBodyResponse { body: "b".into(), end_of_stream: true };
        let common = CommonResponse {
            header_mutation: Some(mutation.clone()),
            body_mutation: Some(BodyMutation { streamed_response: Some(piece) }),
            clear_route_cache: true,
        };
        let written_header = [field(1, &[field(1, b"k"), field(3, b"v")].concat()), vec![3 << 3, 2]].concat();
        let written_mutation = [field(1, &written_header), field(2, b"r")].concat();
        let written_piece = field(3, &[field(1, b"b"), vec![2 << 3, 1]].concat());
        let written_common =
            [field(2, &written_mutation), field(3, &written_piece), vec![5 << 3, 1]].concat();
        let value = field(1, &[field(1, b"n"), field(2, &field(3, b"t"))].concat());
        let head = HeadersResponse { response: Some(common.clone()) };
        let answer = ProcessingResponse {
            response: Some(processing_response::Response::RequestHeaders(head)),
            dynamic_metadata: Some(Struct::with("n", value::Kind::Text("t".to_owned()))),
        };
        let written = [field(1, &field(1, &written_common)), field(8, &value)].concat();
        assert_eq!(answer.encode_to_vec(), written);
        let body = BodyResponse { response: Some(common) };
        let answer = ProcessingResponse {
            response: Some(processing_response::Response::ResponseBody(body)),
            dynamic_metadata: None,
        };
        assert_eq!(answer.encode_to_vec(), field(4, &field(1, &written_common)));
        let refusal = ImmediateResponse {
            status: Some(HttpStatus { code: 99 }),
            headers: Some(mutation),
            body: "b".into(),
            details: "d".to_owned(),
        };
        let answer = ProcessingResponse {
            response: Some(processing_response::Response::ImmediateResponse(refusal)),
            dynamic_metadata: None,
        };
        let written =
            [field(1, &[1 << 3, 99]), field(2, &written_mutation), field(3, b"b"), field(5, b"d")].concat();
        assert_eq!(answer.encode_to_vec(), field(7, &written));
    }

    #[test]
    fn a_first_message_of_envoy_is_read() {
        let header = field(1, &[field(1, b":path"), field(3, b"/v1/completions")].concat());
        let head = [field(1, &header), vec![3 << 3, 1]].concat();
        let hint = field(1, &[field(1, b"k"), field(2, &field(6, &field(1, &field(3, b"a:1"))))].concat());
        let metadata = field(1, &[field(1, b"ns"), field(2, &hint)].concat());
        let modes = [1 << 3, 4, 2 << 3, 4];
        let written = [field(2, &head), field(8, &metadata), field(11, &modes)].concat();
        let message = ProcessingRequest::decode(&written[..]).unwrap();
        let Some(processing_request::Request::RequestHeaders(head)) = message.request else {
            panic!("no head")
        };
        assert!(head.end_of_stream);
        assert_eq!(head.headers.unwrap().headers[0].bytes(), b"/v1/completions");
        let metadata = message.metadata_context.unwrap();
        assert_eq!(metadata.get("ns", "k").unwrap().texts(), ["a:1"]);
        let config = message.protocol_config.unwrap();
        assert_eq!(config.request_body_mode(), BodySendMode::FullDuplexStreamed);
        assert_eq!(config.response_body_mode(), BodySendMode::FullDuplexStreamed);
    }
}
