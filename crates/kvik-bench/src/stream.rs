//! One stream of a client, with the time of each of its events.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Collected, Full};
use hyper::Request;
use hyper::body::Incoming;
use kvik_proto::client::HttpClient;
use kvik_proto::sse::SseDecoder;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Longest time between two tokens that is waited for.
const MAX_SILENCE: Duration = Duration::from_mins(2);

/// Tokens that prompts are made of: neither special ones nor single bytes.
const PROMPT_TOKENS: std::ops::Range<u64> = 300..4000;

/// A prompt of random tokens, the same on every machine for equal numbers (`SplitMix64`).
pub(crate) fn random_prompt(number: u64, n_tokens: usize) -> Vec<u64> {
    let mut state = number.wrapping_mul(0x2545_f491_4f6c_dd1d);
    let mut next_token = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        PROMPT_TOKENS.start + (mixed ^ (mixed >> 31)) % (PROMPT_TOKENS.end - PROMPT_TOKENS.start)
    };
    (0..n_tokens).map(|_| next_token()).collect()
}

/// What a stream gave: its text, and the time of each of its events with text.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recorded {
    pub(crate) text: String,
    pub(crate) times: Vec<Instant>,
}

/// A stream that is read as it comes; dropped, it ends.
#[derive(Debug)]
pub(crate) struct Stream {
    /// The worker that it began at.
    pub(crate) worker: String,
    recorded: Arc<Mutex<Recorded>>,
    n_events: watch::Receiver<usize>,
    reading: JoinHandle<anyhow::Result<()>>,
}

impl Stream {
    /// Sends a request for a stream of completions and begins to read.
    ///
    /// # Errors
    /// If it is not answered with a stream.
    pub(crate) async fn open(http: &HttpClient, gateway: &str, body: &Value) -> anyhow::Result<Self> {
        let request = Request::post(format!("{gateway}/v1/completions"))
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.to_string())))?;
        let response = http.request(request).await.context("reach the gateway")?;
        let status = response.status();
        let worker = response.headers().get("x-kvik-worker").and_then(|value| value.to_str().ok());
        let worker = worker.unwrap_or_default().to_owned();
        let body = response.into_body();
        if !status.is_success() {
            let text = body.collect().await.map(Collected::to_bytes).unwrap_or_default();
            anyhow::bail!("the gateway answered {status}: {}", String::from_utf8_lossy(&text));
        }
        let recorded = Arc::new(Mutex::new(Recorded::default()));
        let (sender, n_events) = watch::channel(0);
        let reading = tokio::spawn(read(body, Arc::clone(&recorded), sender));
        Ok(Self { worker, recorded, n_events, reading })
    }

    /// Events so far.
    pub(crate) fn n_events(&self) -> usize {
        *self.n_events.borrow()
    }

    /// Waits until there are `n_events`; false if the stream ends before.
    ///
    /// # Errors
    /// If nothing comes for two minutes.
    pub(crate) async fn reached(&mut self, n_events: usize) -> anyhow::Result<bool> {
        let waiting = self.n_events.wait_for(|n| n_events <= *n);
        let waited = tokio::time::timeout(MAX_SILENCE, waiting).await.context("wait for tokens")?;
        Ok(waited.is_ok())
    }

    /// Reads to the end.
    ///
    /// # Errors
    /// If the stream has failed or broken off.
    pub(crate) async fn finish(mut self) -> anyhow::Result<Recorded> {
        (&mut self.reading).await.context("read a stream")??;
        Ok(std::mem::take(&mut *self.recorded.lock()))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.reading.abort();
    }
}

async fn read(
    mut body: Incoming,
    recorded: Arc<Mutex<Recorded>>,
    n_events: watch::Sender<usize>,
) -> anyhow::Result<()> {
    let mut decoder = SseDecoder::default();
    let (mut is_done, mut failure) = (false, None);
    while let Some(frame) = body.frame().await {
        let Ok(bytes) = frame.context("read a stream")?.into_data() else { continue };
        let now = Instant::now();
        let mut recorded = recorded.lock();
        decoder.push(&bytes, |data| {
            if data == "[DONE]" {
                is_done = true;
                return;
            }
            let event = serde_json::from_str::<Value>(data).unwrap_or_default();
            if event.get("error").is_some() {
                failure = Some(data.to_owned());
            }
            if let Some(text) = event["choices"][0]["text"].as_str() {
                recorded.text.push_str(text);
                recorded.times.push(now);
            }
        })?;
        n_events.send_replace(recorded.times.len());
    }
    if let Some(failure) = failure {
        anyhow::bail!("a stream failed: {failure}");
    }
    ensure!(is_done, "a stream broke off");
    Ok(())
}

/// The times between events, in milliseconds; one less than there are events.
pub(crate) fn gaps_ms(times: &[Instant]) -> Vec<f64> {
    times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect()
}

/// The value that a share of all is at most; not a number if there are none.
pub(crate) fn percentile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_one_of_the_values() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let found = [0.0, 0.5, 0.99, 1.0].map(|share| percentile(&values, share).to_string());
        assert_eq!(found, ["1", "50", "99", "100"]);
        assert!(percentile(&[], 0.5).is_nan());
    }
}
