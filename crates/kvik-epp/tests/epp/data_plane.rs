//! A client that says what Envoy says.

use std::net::SocketAddr;

use bytes::Bytes;
use futures_util::stream;
use kvik_epp::PROCESS_PATH;
use kvik_epp::exchange::{DESTINATION, LOAD_BALANCER_NAMESPACE, PREFILLER, SERVED};
use kvik_epp::messages::processing_request::Request;
use kvik_epp::messages::processing_response::Response;
use kvik_epp::messages::{
    CommonResponse, HeaderMap, HeaderValue, HttpBody, HttpHeaders, HttpTrailers, ImmediateResponse, Metadata,
    ProcessingRequest, ProcessingResponse, Struct, value,
};
use tokio::sync::mpsc;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;

use crate::engine::MODEL;
use crate::support::in_time;

/// A connection of a data plane.
#[derive(Clone)]
pub(crate) struct DataPlane {
    channel: Channel,
}

/// One exchange; dropping it is what a data plane does whose client has left.
pub(crate) struct Exchange {
    pub(crate) messages: mpsc::Sender<ProcessingRequest>,
    pub(crate) answers: Streaming<ProcessingResponse>,
}

/// Where a request goes, and with which body.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) endpoints: Vec<String>,
    pub(crate) prefill_endpoint: Option<String>,
    pub(crate) content_length: Option<usize>,
    pub(crate) removed_headers: Vec<String>,
    pub(crate) body: Vec<u8>,
    pub(crate) has_trailers: bool,
}

/// What the first answer is.
#[derive(Debug)]
pub(crate) enum Outcome {
    Sent(Box<Sent>),
    Refused(ImmediateResponse),
}

impl DataPlane {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        Self { channel: endpoint.connect().await.unwrap() }
    }

    pub(crate) fn connect_lazy(address: SocketAddr) -> Self {
        Self { channel: Endpoint::from_shared(format!("http://{address}")).unwrap().connect_lazy() }
    }

    pub(crate) fn new(channel: Channel) -> Self {
        Self { channel }
    }

    pub(crate) fn grpc(&self) -> Grpc<Channel> {
        Grpc::new(self.channel.clone()).max_decoding_message_size(64 << 10)
    }

    /// Opens a stream for one request.
    pub(crate) async fn open(&self) -> Exchange {
        self.try_open().await.unwrap()
    }

    /// The same to a picker that may not want it.
    pub(crate) async fn try_open(&self) -> Result<Exchange, Status> {
        let (messages, mut sent) = mpsc::channel(1);
        let sent = stream::poll_fn(move |context| sent.poll_recv(context));
        let mut grpc = self.grpc();
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let path = PROCESS_PATH.parse().unwrap();
        let codec = ProstCodec::<ProcessingRequest, ProcessingResponse>::default();
        let answers = in_time(grpc.streaming(tonic::Request::new(sent), path, codec)).await?;
        Ok(Exchange { messages, answers: answers.into_inner() })
    }

    /// Sends a completion and reads what becomes of it.
    pub(crate) async fn complete(&self, body: &[u8]) -> (Exchange, Outcome) {
        self.complete_among(body, None).await
    }

    /// The same with these endpoints only.
    pub(crate) async fn complete_among(&self, body: &[u8], subset: Option<Metadata>) -> (Exchange, Outcome) {
        let mut exchange = self.open().await;
        let head = ProcessingRequest { metadata_context: subset, ..request_head(&[], body.is_empty()) };
        exchange.send(head).await;
        if !body.is_empty() {
            exchange.send(piece(Bytes::copy_from_slice(body), true)).await;
        }
        let outcome = exchange.outcome().await;
        (exchange, outcome)
    }
}

impl Outcome {
    #[track_caller]
    pub(crate) fn sent(self) -> Sent {
        match self {
            Self::Sent(sent) => *sent,
            Self::Refused(refusal) => panic!("{refusal:?}"),
        }
    }

    /// Status and text of a refusal, and its headers by name.
    #[track_caller]
    pub(crate) fn refused(self) -> (i32, String, Vec<(String, String)>) {
        let Self::Refused(refusal) = self else { panic!("{self:?}") };
        let headers = refusal.headers.unwrap_or_default().set_headers.into_iter().map(|set| {
            let header = set.header.unwrap();
            (header.key.clone(), text(&header))
        });
        let body = String::from_utf8(refusal.body.to_vec()).unwrap();
        (refusal.status.unwrap().code, body, headers.collect())
    }
}

impl Exchange {
    pub(crate) async fn send(&mut self, message: ProcessingRequest) {
        in_time(self.messages.send(message)).await.unwrap();
    }

    /// The next answer; `None` at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<ProcessingResponse>, Status> {
        in_time(self.answers.message()).await
    }

    /// Reads until the request may go on to its worker.
    pub(crate) async fn outcome(&mut self) -> Outcome {
        let first = self.next().await.unwrap().expect("an answer");
        let (head, metadata) = match first.response.unwrap() {
            Response::ImmediateResponse(refusal) => return Outcome::Refused(refusal),
            Response::RequestHeaders(head) => (head.response.unwrap(), first.dynamic_metadata.unwrap()),
            other => panic!("{other:?}"),
        };
        let mut sent = Sent::read(head, &metadata);
        while sent.content_length.is_some() {
            let answer = self.next().await.unwrap().expect("the rest of the request");
            match answer.response.unwrap() {
                Response::RequestBody(body) => {
                    let mutation = body.response.unwrap().body_mutation.unwrap();
                    let piece = mutation.streamed_response.unwrap();
                    sent.body.extend_from_slice(&piece.body);
                    if piece.end_of_stream {
                        break;
                    }
                }
                Response::RequestTrailers(_) => {
                    sent.has_trailers = true;
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        Outcome::Sent(Box::new(sent))
    }

    /// Answers in place of the worker that was chosen, and checks that the answer passes.
    pub(crate) async fn answer(&mut self, status: u16, served: Option<&str>, pieces: &[&[u8]]) {
        self.answer_head(status, served).await;
        for (number, bytes) in pieces.iter().enumerate() {
            let is_last = number + 1 == pieces.len();
            let body = HttpBody { body: Bytes::copy_from_slice(bytes), end_of_stream: is_last };
            self.send(message(Request::ResponseBody(body))).await;
            let mut passed = Vec::new();
            while passed.len() < bytes.len() {
                let answer = self.next().await.unwrap().expect("the answer's body");
                let Some(Response::ResponseBody(body)) = answer.response else { panic!("no body") };
                let piece = body.response.unwrap().body_mutation.unwrap().streamed_response.unwrap();
                passed.extend_from_slice(&piece.body);
                assert_eq!(piece.end_of_stream, is_last && passed.len() == bytes.len());
            }
            assert_eq!(passed, *bytes);
        }
        assert_eq!(self.next().await.unwrap(), None);
    }

    pub(crate) async fn answer_head(&mut self, status: u16, served: Option<&str>) {
        let kind = ("content-type", "text/event-stream");
        let mut head =
            message(Request::ResponseHeaders(http_headers(&[(":status", &status.to_string()), kind], false)));
        head.metadata_context = served.map(|served| {
            metadata(LOAD_BALANCER_NAMESPACE, Struct::with(SERVED, value::Kind::Text(served.to_owned())))
        });
        self.send(head).await;
        let answer = self.next().await.unwrap().expect("the answer's head");
        assert!(matches!(answer.response, Some(Response::ResponseHeaders(_))), "{answer:?}");
    }
}

impl Sent {
    fn read(head: CommonResponse, metadata: &Struct) -> Self {
        assert!(head.clear_route_cache);
        let mutation = head.header_mutation.unwrap();
        let get = |name: &str| {
            let headers = mutation.set_headers.iter().map(|set| set.header.as_ref().unwrap());
            headers.into_iter().find(|header| header.key == name).map(text)
        };
        let endpoints = get(DESTINATION).unwrap();
        // Header and metadata say the same.
        let expected = Struct::with(
            LOAD_BALANCER_NAMESPACE,
            value::Kind::Struct(Struct::with(DESTINATION, value::Kind::Text(endpoints.clone()))),
        );
        assert_eq!(*metadata, expected);
        Self {
            endpoints: endpoints.split(',').map(str::to_owned).collect(),
            prefill_endpoint: get(PREFILLER),
            content_length: get("content-length").map(|length| length.parse().unwrap()),
            removed_headers: mutation.remove_headers,
            body: Vec::new(),
            has_trailers: false,
        }
    }
}

fn text(header: &HeaderValue) -> String {
    String::from_utf8(header.bytes().to_vec()).unwrap()
}

pub(crate) fn metadata(namespace: &str, fields: Struct) -> Metadata {
    let mut metadata = Metadata::default();
    metadata.filter_metadata.insert(namespace.to_owned(), fields);
    metadata
}

pub(crate) fn message(request: Request) -> ProcessingRequest {
    ProcessingRequest { request: Some(request), ..ProcessingRequest::default() }
}

pub(crate) fn http_headers(headers: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let headers = headers.iter().map(|(name, value)| HeaderValue {
        key: (*name).to_owned(),
        value: String::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    });
    HttpHeaders { headers: Some(HeaderMap { headers: headers.collect() }), end_of_stream }
}

/// The head of a completion.
pub(crate) fn request_head(more: &[(&str, &str)], end_of_stream: bool) -> ProcessingRequest {
    let mut headers = vec![(":method", "POST"), (":path", "/v1/completions"), (":authority", "pool")];
    headers.extend_from_slice(more);
    message(Request::RequestHeaders(http_headers(&headers, end_of_stream)))
}

/// A piece of a request's body.
pub(crate) fn piece(body: impl Into<Bytes>, end_of_stream: bool) -> ProcessingRequest {
    message(Request::RequestBody(HttpBody { body: body.into(), end_of_stream }))
}

pub(crate) fn trailers() -> ProcessingRequest {
    message(Request::RequestTrailers(HttpTrailers { trailers: None }))
}

/// A completion of about so many bytes that no other number has.
pub(crate) fn completion(number: usize, n_bytes: usize) -> Vec<u8> {
    let filling = "x".repeat(n_bytes);
    format!(r#"{{"model":"{MODEL}","max_tokens":8,"prompt":"{number} {filling}"}}"#).into_bytes()
}
