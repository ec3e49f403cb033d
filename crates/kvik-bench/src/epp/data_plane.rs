//! A data plane that asks for engines and makes up their answers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use futures_util::stream;
use kvik_epp::PROCESS_PATH;
use kvik_epp::messages::processing_request::Request;
use kvik_epp::messages::processing_response::Response;
use kvik_epp::messages::{
    HeaderMap, HeaderValue, HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse,
};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::Streaming;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

/// Bytes of a piece of a body: a data frame of HTTP/2, as Envoy passes them on.
pub(super) const PIECE_BYTES: usize = 16 << 10;
/// The answer of every engine.
const ANSWER: &[u8] = br#"{"choices":[{"text":"x"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#;

/// One connection to a picker.
#[derive(Debug)]
pub(super) struct DataPlane {
    runtime: Runtime,
    channel: Channel,
}

impl DataPlane {
    pub(super) fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?
            .initial_stream_window_size(1 << 20)
            .initial_connection_window_size(16 << 20)
            .tcp_nodelay(true);
        let channel = runtime.block_on(endpoint.connect()).context("connect to the picker")?;
        Ok(Self { runtime, channel })
    }

    /// Asks for engines, `concurrency` requests at a time; returns requests per second.
    pub(super) fn rate(&self, bodies: &[Bytes], concurrency: usize, time: Duration) -> anyhow::Result<f64> {
        let (next, n_done) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let bodies: Arc<[Bytes]> = bodies.into();
        let started = Instant::now();
        self.runtime.block_on(async {
            let mut running = JoinSet::new();
            for _ in 0..concurrency {
                let (channel, bodies) = (self.channel.clone(), Arc::clone(&bodies));
                let (next, n_done) = (Arc::clone(&next), Arc::clone(&n_done));
                running.spawn(async move {
                    while started.elapsed() < time {
                        // Relaxed: there is one thread.
                        let idx = next.fetch_add(1, Ordering::Relaxed);
                        exchange(&channel, &bodies[idx % bodies.len()]).await?;
                        n_done.fetch_add(1, Ordering::Relaxed);
                    }
                    anyhow::Ok(())
                });
            }
            while let Some(ended) = running.join_next().await {
                ended.context("a client ended early")??;
            }
            anyhow::Ok(())
        })?;
        Ok(n_done.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64())
    }
}

/// One request and its answer.
async fn exchange(channel: &Channel, body: &Bytes) -> anyhow::Result<()> {
    let n_pieces = body.len().div_ceil(PIECE_BYTES);
    let (messages, mut sent) = mpsc::channel(n_pieces + 4);
    let sent = stream::poll_fn(move |context| sent.poll_recv(context));
    let mut grpc = Grpc::new(channel.clone());
    grpc.ready().await.context("reach the picker")?;
    let codec = ProstCodec::<ProcessingRequest, ProcessingResponse>::default();
    messages.send(head(true)).await?;
    for number in 0..n_pieces {
        let piece = body.slice(number * PIECE_BYTES..body.len().min((number + 1) * PIECE_BYTES));
        let piece = HttpBody { body: piece, end_of_stream: number + 1 == n_pieces };
        messages.send(message(Request::RequestBody(piece))).await?;
    }
    let answers = grpc.streaming(tonic::Request::new(sent), PROCESS_PATH.parse()?, codec).await?;
    let mut answers = answers.into_inner();
    ensure!(matches!(next(&mut answers).await?, Response::RequestHeaders(_)), "no engine was chosen");
    let mut n_bytes = 0;
    while n_bytes < body.len() {
        let Response::RequestBody(piece) = next(&mut answers).await? else {
            bail!("the body did not come back")
        };
        let piece = piece.response.and_then(|common| common.body_mutation?.streamed_response);
        n_bytes += piece.context("read a piece")?.body.len();
    }
    messages.send(head(false)).await?;
    let piece = HttpBody { body: Bytes::from_static(ANSWER), end_of_stream: true };
    messages.send(message(Request::ResponseBody(piece))).await?;
    next(&mut answers).await?;
    next(&mut answers).await?;
    ensure!(answers.message().await?.is_none(), "an exchange did not end");
    Ok(())
}

async fn next(answers: &mut Streaming<ProcessingResponse>) -> anyhow::Result<Response> {
    let answer = answers.message().await.context("read an answer")?.context("an exchange ended early")?;
    answer.response.context("an answer says nothing")
}

fn message(request: Request) -> ProcessingRequest {
    ProcessingRequest { request: Some(request), ..ProcessingRequest::default() }
}

/// The head of the request or of its answer, with the headers that proxies have.
fn head(is_request: bool) -> ProcessingRequest {
    let headers: &[(&str, &'static str)] = if is_request {
        &[
            (":method", "POST"),
            (":path", "/v1/chat/completions"),
            (":authority", "inference.example.com"),
            (":scheme", "https"),
            ("content-type", "application/json"),
            ("accept", "*/*"),
            ("user-agent", "OpenAI/Python 1.0"),
            ("x-forwarded-for", "10.0.0.1"),
            ("x-forwarded-proto", "https"),
            ("x-request-id", "2f6c1f5e-8f0a-4f7c-9f58-1d2c3b4a5968"),
        ]
    } else {
        &[(":status", "200"), ("content-type", "application/json"), ("server", "uvicorn")]
    };
    let headers = headers.iter().map(|(name, value)| HeaderValue {
        key: (*name).to_owned(),
        value: String::new(),
        raw_value: Bytes::from_static(value.as_bytes()),
    });
    let headers =
        HttpHeaders { headers: Some(HeaderMap { headers: headers.collect() }), end_of_stream: false };
    message(if is_request { Request::RequestHeaders(headers) } else { Request::ResponseHeaders(headers) })
}
