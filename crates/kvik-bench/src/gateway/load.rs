//! The clients of the bench: one thread that sends requests and waits for their answers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bytes::Bytes;
use http::{HeaderValue, Request, Uri, header};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::mock::{MODEL, Pace};

/// Bytes of the messages of which a long prompt consists.
const MESSAGE_BYTES: usize = 2_000;
/// Different prompts of one length, so that more than one worker gets requests.
const N_PROMPTS: usize = 16;
const PATH: &str = "/v1/chat/completions";

/// Sends requests.
#[derive(Debug)]
pub(crate) struct Load {
    runtime: Runtime,
    client: Client<HttpConnector, Full<Bytes>>,
}

/// Where requests go: to all addresses in turn.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    uris: Arc<[Uri]>,
}

/// When a load ends.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Until {
    /// After this many requests.
    Requests(usize),
    /// When no request has been begun for this long after the start.
    Elapsed(Duration),
}

impl Target {
    pub(crate) fn new(addresses: &[SocketAddr]) -> anyhow::Result<Self> {
        let uri = |address: &SocketAddr| format!("http://{address}{PATH}").parse::<Uri>();
        Ok(Self { uris: addresses.iter().map(uri).collect::<Result<_, _>>()? })
    }

    fn uri(&self, idx: usize) -> Uri {
        self.uris[idx % self.uris.len()].clone()
    }
}

impl Load {
    pub(crate) fn try_new() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self { runtime, client })
    }

    /// The median time of `n_requests` requests, one after the other, in microseconds.
    pub(crate) fn median_us(
        &self,
        target: &Target,
        bodies: &[Bytes],
        n_requests: usize,
    ) -> anyhow::Result<f64> {
        let mut times = Vec::with_capacity(n_requests);
        self.runtime.block_on(async {
            for idx in 0..n_requests {
                let started = Instant::now();
                send(&self.client, target.uri(idx), bodies[idx % bodies.len()].clone()).await?;
                times.push(started.elapsed());
            }
            anyhow::Ok(())
        })?;
        times.sort_unstable();
        Ok(times[times.len() / 2].as_secs_f64() * 1e6)
    }

    /// Sends requests, `concurrency` of them at a time; returns requests per second.
    pub(crate) fn rate(
        &self,
        target: &Target,
        bodies: &[Bytes],
        concurrency: usize,
        until: Until,
    ) -> anyhow::Result<f64> {
        let next = Arc::new(AtomicUsize::new(0));
        let n_done = Arc::new(AtomicUsize::new(0));
        let bodies: Arc<[Bytes]> = bodies.into();
        let started = Instant::now();
        self.run((0..concurrency).map(|_| {
            let (client, target, bodies) = (self.client.clone(), target.clone(), Arc::clone(&bodies));
            let (next, n_done) = (Arc::clone(&next), Arc::clone(&n_done));
            async move {
                loop {
                    // Relaxed: there is one thread.
                    let idx = next.fetch_add(1, Ordering::Relaxed);
                    let is_over = match until {
                        Until::Requests(n_requests) => n_requests <= idx,
                        Until::Elapsed(time) => time <= started.elapsed(),
                    };
                    if is_over {
                        return Ok(());
                    }
                    send(&client, target.uri(idx), bodies[idx % bodies.len()].clone()).await?;
                    n_done.fetch_add(1, Ordering::Relaxed);
                }
            }
        }))?;
        Ok(n_done.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64())
    }

    /// Opens `n_streams` streams at once and reads them to their ends of `n_bytes` each.
    pub(crate) fn stream(
        &self,
        target: &Target,
        body: &Bytes,
        n_streams: usize,
        n_bytes: usize,
    ) -> anyhow::Result<()> {
        self.run((0..n_streams).map(|idx| {
            let (client, uri, body) = (self.client.clone(), target.uri(idx), body.clone());
            async move {
                let n_received = send(&client, uri, body).await?;
                ensure!(n_received == n_bytes, "a stream has {n_received} bytes instead of {n_bytes}");
                Ok(())
            }
        }))
    }

    fn run(
        &self,
        tasks: impl Iterator<Item = impl Future<Output = anyhow::Result<()>> + Send + 'static>,
    ) -> anyhow::Result<()> {
        self.runtime.block_on(async {
            let mut running = JoinSet::new();
            for task in tasks {
                running.spawn(task);
            }
            while let Some(ended) = running.join_next().await {
                ended.context("a client ended early")??;
            }
            Ok(())
        })
    }
}

/// Sends one request and returns the bytes of its answer, of which nothing is kept.
async fn send(client: &Client<HttpConnector, Full<Bytes>>, uri: Uri, body: Bytes) -> anyhow::Result<usize> {
    let mut request = Request::post(uri).body(Full::new(body))?;
    request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let response = client.request(request).await.context("send a request")?;
    let status = response.status();
    ensure!(status.is_success(), "a request was answered with {status}");
    let mut body = response.into_body();
    let mut n_bytes = 0;
    while let Some(frame) = body.frame().await {
        n_bytes += frame.context("read an answer")?.data_ref().map_or(0, Bytes::len);
    }
    Ok(n_bytes)
}

/// Requests of about `n_bytes`: a conversation of messages with line breaks and quotes.
pub(crate) fn prompts(n_bytes: usize) -> Vec<Bytes> {
    let prompt = |number: usize| {
        let n_messages = n_bytes.div_ceil(MESSAGE_BYTES);
        let messages: Vec<_> = (0..n_messages)
            .map(|idx| {
                let role = if idx % 2 == 0 { "user" } else { "assistant" };
                json!({"role": role, "content": text(number, n_bytes / n_messages)})
            })
            .collect();
        Bytes::from(json!({"model": MODEL, "max_tokens": 16, "messages": messages}).to_string())
    };
    (0..N_PROMPTS).map(prompt).collect()
}

/// A request for a stream of `n_chunks`.
pub(crate) fn stream_request(n_chunks: usize, pace: Pace) -> Bytes {
    let messages = [json!({"role": "user", "content": text(0, 200)})];
    let request = json!({
        "model": MODEL,
        "stream": true,
        "n_chunks": n_chunks,
        "is_paced": pace == Pace::Steps,
        "messages": messages,
    });
    Bytes::from(request.to_string())
}

fn text(number: usize, n_bytes: usize) -> String {
    const LINE: &str = "and then the \"reader\" turns the page, for there is more to come;\n";
    let mut text = format!("Story {number}: ");
    while text.len() < n_bytes {
        text.push_str(LINE);
    }
    text.truncate(n_bytes);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_have_about_the_length_asked_for_and_differ() {
        for n_bytes in [800, 220_000] {
            let prompts = prompts(n_bytes);
            assert!(prompts.iter().all(|prompt| prompt.len().abs_diff(n_bytes) < n_bytes / 5));
            assert_ne!(prompts[0], prompts[1]);
        }
    }
}
