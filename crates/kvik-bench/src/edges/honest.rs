//! Clients that do nothing wrong.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use kvik_proto::client::{HttpClient, TlsClientConfig, http_client};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use crate::gateway::load::prompts;

/// Bytes of a prompt.
const PROMPT_BYTES: usize = 800;
/// Time after which a request counts as not served: what a patient client waits.
const PATIENCE: Duration = Duration::from_secs(5);

/// Sends requests at a steady rate.
#[derive(Debug)]
pub(super) struct Honest {
    runtime: Runtime,
    tls: TlsClientConfig,
    /// Keeps its connections.
    kept: HttpClient,
    urls: [String; 2],
    bodies: Vec<Bytes>,
}

/// What became of the requests.
#[derive(Debug, Default)]
pub(super) struct Served {
    pub(super) n_sent: usize,
    /// Of those that were served, sorted.
    times: Vec<Duration>,
    /// Why one was not.
    pub(super) failure: Option<String>,
}

impl Honest {
    pub(super) fn try_new(
        plain: SocketAddr,
        encrypted: SocketAddr,
        authority_pem: &[u8],
    ) -> anyhow::Result<Self> {
        let tls = TlsClientConfig { authorities_pem: authority_pem.to_vec(), identity_pem: None };
        Ok(Self {
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build()?,
            kept: http_client(&tls)?,
            tls,
            urls: [("http", plain), ("https", encrypted)]
                .map(|(scheme, address)| format!("{scheme}://{address}/v1/chat/completions")),
            bodies: prompts(PROMPT_BYTES),
        })
    }

    /// Sends requests for `time`, every other one over a connection of its own, and waits for their answers.
    pub(super) fn send(&self, is_encrypted: bool, rate: u32, time: Duration) -> anyhow::Result<Served> {
        self.runtime.block_on(async {
            let mut ticks = tokio::time::interval(Duration::from_secs(1) / rate);
            // A client that was late does not hurry.
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut running = JoinSet::new();
            let mut served = Served::default();
            let end = Instant::now() + time;
            while ticks.tick().await < end {
                let client =
                    if served.n_sent.is_multiple_of(2) { self.kept.clone() } else { http_client(&self.tls)? };
                let url = self.urls[usize::from(is_encrypted)].clone();
                let body = self.bodies[served.n_sent % self.bodies.len()].clone();
                served.n_sent += 1;
                running.spawn(async move {
                    let begin = Instant::now();
                    let answer = tokio::time::timeout(PATIENCE, ask(&client, url, body)).await;
                    answer.context("no answer in time").flatten().map(|()| begin.elapsed())
                });
            }
            while let Some(ended) = running.join_next().await {
                match ended.context("a client ended early")? {
                    Ok(time) => served.times.push(time),
                    Err(error) => served.failure = Some(format!("{error:#}")),
                }
            }
            served.times.sort_unstable();
            Ok(served)
        })
    }
}

impl Served {
    pub(super) fn n_served(&self) -> usize {
        self.times.len()
    }

    /// The 99th percentile of the times, in milliseconds; `None` if nothing was served.
    pub(super) fn p99_ms(&self) -> Option<f64> {
        let idx = (self.times.len() * 99).div_ceil(100).checked_sub(1)?;
        Some(self.times[idx].as_secs_f64() * 1e3)
    }
}

async fn ask(client: &HttpClient, url: String, body: Bytes) -> anyhow::Result<()> {
    let request =
        Request::post(url).header(http::header::CONTENT_TYPE, "application/json").body(Full::new(body))?;
    let response = client.request(request).await.context("send a request")?;
    let status = response.status();
    response.into_body().collect().await.context("read an answer")?;
    if !status.is_success() {
        bail!("answered with {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_percentile_is_one_of_the_times() {
        let served = |n_times: u64| Served {
            n_sent: 0,
            times: (1..=n_times).map(Duration::from_millis).collect(),
            failure: None,
        };
        assert_eq!(served(0).p99_ms(), None);
        for (n_times, expected) in [(1, 1.0), (50, 50.0), (100, 99.0), (1000, 990.0)] {
            assert!((served(n_times).p99_ms().unwrap() - expected).abs() < 1e-9, "{n_times}");
        }
    }
}
