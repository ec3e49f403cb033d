//! The clients of a demo: each holds one conversation after the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use kvik_proto::client::{HttpClient, TlsClientConfig, http_client};
use kvik_proto::sse::SseDecoder;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::tally::{Sample, Tally, Tokens};
use super::workload::{Conversation, Numbers};

/// Pause after a request that failed, so that a gateway without workers is not flooded.
const FAILURE_PAUSE: Duration = Duration::from_millis(50);

/// Time for a gateway to have a worker.
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// How requests are placed and what they may reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reuse {
    /// As the gateway decides.
    Allowed,
    /// Each request has a session of its own: the gateway spreads them without looking at prompts.
    Spread,
    /// Each request has a cache salt of its own: no KV can be reused.
    Forbidden,
}

/// A load on one gateway.
#[derive(Debug, Clone)]
pub(super) struct Load {
    pub(super) gateway: String,
    pub(super) model: String,
    pub(super) n_clients: u64,
    pub(super) duration: Duration,
    pub(super) reuse: Reuse,
}

/// What a request gave.
struct Answer {
    text: String,
    ttft: Duration,
    tokens: Tokens,
}

impl Load {
    /// Runs all clients until the time is over and their last requests have ended.
    pub(super) async fn run(&self, start: Instant, tally: &Arc<Mutex<Tally>>) -> anyhow::Result<()> {
        let http = http_client(&TlsClientConfig::default())?;
        let mut clients = JoinSet::new();
        for number in 0..self.n_clients {
            let (load, http, tally) = (self.clone(), http.clone(), Arc::clone(tally));
            clients.spawn(async move { load.converse(&http, number, start, &tally).await });
        }
        while let Some(ended) = clients.join_next().await {
            ended.context("run a client")?;
        }
        Ok(())
    }

    async fn converse(&self, http: &HttpClient, number: u64, start: Instant, tally: &Mutex<Tally>) {
        let mut numbers = Numbers::new(number);
        let mut n_requests = 0_u64;
        while start.elapsed() < self.duration {
            let mut conversation = Conversation::new(&mut numbers);
            while let Some(mut body) = conversation.next_request(&self.model) {
                if self.duration <= start.elapsed() {
                    return;
                }
                n_requests += 1;
                let mut session = None;
                match self.reuse {
                    Reuse::Allowed => {}
                    Reuse::Spread => session = Some(format!("{number}-{n_requests}")),
                    Reuse::Forbidden => body["cache_salt"] = json!(format!("{number}-{n_requests}")),
                }
                let at = start.elapsed();
                let Ok(answer) = self.ask(http, &body, session).await else {
                    tally.lock().n_failed += 1;
                    tokio::time::sleep(FAILURE_PAUSE).await;
                    break;
                };
                tally.lock().add(Sample { at, ttft: answer.ttft, tokens: answer.tokens });
                conversation.answered(&answer.text);
            }
        }
    }

    async fn ask(&self, http: &HttpClient, body: &Value, session: Option<String>) -> anyhow::Result<Answer> {
        let mut request = Request::post(format!("{}/v1/chat/completions", self.gateway))
            .header("content-type", "application/json");
        if let Some(session) = session {
            request = request.header("x-session-id", session);
        }
        let begin = Instant::now();
        let response = http.request(request.body(Full::new(Bytes::from(body.to_string())))?).await?;
        let status = response.status();
        ensure!(status.is_success(), "the gateway answered {status}");
        let mut body = response.into_body();
        let mut decoder = SseDecoder::default();
        let (mut text, mut ttft, mut tokens) = (String::new(), None, None);
        let (mut is_done, mut has_failed) = (false, false);
        while let Some(frame) = body.frame().await {
            let Ok(bytes) = frame?.into_data() else { continue };
            decoder.push(&bytes, |data| {
                if data == "[DONE]" {
                    is_done = true;
                    return;
                }
                let event = serde_json::from_str::<Value>(data).unwrap_or_default();
                has_failed |= event.get("error").is_some();
                if let Some(delta) = event["choices"][0]["delta"]["content"].as_str() {
                    text.push_str(delta);
                    ttft.get_or_insert_with(|| begin.elapsed());
                }
                if event["usage"].is_object() {
                    tokens = Some(Tokens::read(&event["usage"]));
                }
            })?;
        }
        ensure!(is_done && !has_failed, "the stream broke");
        let ttft = ttft.unwrap_or_else(|| begin.elapsed());
        Ok(Answer { text, ttft, tokens: tokens.unwrap_or_default() })
    }
}

/// Waits until the gateway at this base address can serve requests.
///
/// # Errors
/// If it cannot after ten seconds.
pub async fn wait_until_ready(gateway: &str) -> anyhow::Result<()> {
    let http = http_client(&TlsClientConfig::default())?;
    let begin = Instant::now();
    loop {
        let request = Request::get(format!("{gateway}/ready")).body(Full::default())?;
        let refused = match http.request(request).await {
            Ok(response) if response.status().is_success() => return Ok(()),
            Ok(response) => format!("it answered {}", response.status()),
            Err(error) => error.to_string(),
        };
        ensure!(begin.elapsed() < READY_TIMEOUT, "reach the gateway at {gateway}: {refused}");
        tokio::time::sleep(FAILURE_PAUSE).await;
    }
}
