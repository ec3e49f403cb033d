//! Bursts of requests that go from model to model.

use std::time::{Duration, Instant};

use kvik_proto::client::{HttpClient, TlsClientConfig, http_client};
use serde_json::json;
use tokio::task::JoinSet;

use super::N_MODELS;
use super::engines::Engines;
use crate::stream::{Stream, random_prompt};

/// Tokens of the prompt and of the output of a request to a model that has no burst.
const IDLE_TOKENS: (usize, usize) = (64, 16);
/// Time between two looks at the memory.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// What is sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    pub(super) n_bursts: usize,
    pub(super) n_requests: usize,
    pub(super) prompt_tokens: usize,
    pub(super) output_tokens: usize,
}

/// What came back.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Of all requests, in the order in which they were sent.
    pub(super) texts: Vec<String>,
    /// Of the requests of bursts.
    pub(super) burst_ttft_ms: Vec<f64>,
    /// Of the requests to the others.
    pub(super) idle_ttft_ms: Vec<f64>,
    /// The largest part of the budget that one model held.
    pub(super) peak_share: f64,
    /// Of each burst, the time until its model held more than a third of the budget.
    pub(super) beyond_third_ms: Vec<f64>,
    n_output_tokens: usize,
    took: Duration,
}

/// What one request gave.
struct Answer {
    number: u64,
    is_burst: bool,
    ttft_ms: f64,
    text: String,
}

impl Load {
    pub(super) fn new(is_quick: bool) -> Self {
        if is_quick {
            Self { n_bursts: N_MODELS, n_requests: 16, prompt_tokens: 256, output_tokens: 128 }
        } else {
            Self { n_bursts: 2 * N_MODELS, n_requests: 32, prompt_tokens: 512, output_tokens: 512 }
        }
    }

    /// Tokens that a burst needs at once.
    pub(super) fn burst_tokens(&self) -> usize {
        self.n_requests * (self.prompt_tokens + self.output_tokens)
    }

    /// Sends all bursts, each when the one before has ended.
    ///
    /// # Errors
    /// If a request fails.
    pub(super) async fn run(&self, engines: &Engines) -> anyhow::Result<Outcome> {
        let http = http_client(&TlsClientConfig::default())?;
        let mut outcome = Outcome::default();
        let begin = Instant::now();
        for burst in 0..self.n_bursts {
            self.burst(engines, &http, burst, &mut outcome).await?;
        }
        outcome.took = begin.elapsed();
        Ok(outcome)
    }

    async fn burst(
        &self,
        engines: &Engines,
        http: &HttpClient,
        burst: usize,
        outcome: &mut Outcome,
    ) -> anyhow::Result<()> {
        let busy = burst % N_MODELS;
        let mut answers = JoinSet::new();
        let mut send = |model_idx: usize, number: usize, tokens: (usize, usize)| -> anyhow::Result<()> {
            let number = (burst * 1000 + number) as u64;
            answers.spawn(ask(http.clone(), engines.base(model_idx)?, number, model_idx == busy, tokens));
            Ok(())
        };
        for number in 0..self.n_requests {
            send(busy, number, (self.prompt_tokens, self.output_tokens))?;
        }
        for other in (0..N_MODELS).filter(|other| *other != busy) {
            send(other, self.n_requests + other, IDLE_TOKENS)?;
        }
        let begin = Instant::now();
        let mut beyond_third_ms = None;
        let mut looks = tokio::time::interval(LOOK_INTERVAL);
        let mut done = Vec::new();
        loop {
            tokio::select! {
                answer = answers.join_next() => match answer {
                    Some(answer) => done.push(answer??),
                    None => break,
                },
                _ = looks.tick() => {
                    let Some(held) = engines.held_bytes(busy) else { continue };
                    let share = held as f64 / engines.budget_bytes.max(1) as f64;
                    outcome.peak_share = outcome.peak_share.max(share);
                    if 1.0 / 3.0 < share && beyond_third_ms.is_none() {
                        beyond_third_ms = Some(begin.elapsed().as_secs_f64() * 1e3);
                    }
                }
            }
        }
        done.sort_by_key(|answer| answer.number);
        for answer in done {
            let (ttft, tokens) = if answer.is_burst {
                (&mut outcome.burst_ttft_ms, self.output_tokens)
            } else {
                (&mut outcome.idle_ttft_ms, IDLE_TOKENS.1)
            };
            ttft.push(answer.ttft_ms);
            outcome.n_output_tokens += tokens;
            outcome.texts.push(answer.text);
        }
        outcome.beyond_third_ms.extend(beyond_third_ms);
        Ok(())
    }
}

impl Outcome {
    pub(super) fn tokens_per_s(&self) -> f64 {
        self.n_output_tokens as f64 / self.took.as_secs_f64()
    }
}

async fn ask(
    http: HttpClient,
    base: String,
    number: u64,
    is_burst: bool,
    (prompt_tokens, output_tokens): (usize, usize),
) -> anyhow::Result<Answer> {
    let body = json!({
        "prompt": random_prompt(number, prompt_tokens),
        "max_tokens": output_tokens,
        "ignore_eos": true,
        "temperature": 0,
        "stream": true,
    });
    let sent = Instant::now();
    let mut stream = Stream::open(&http, &base, &body).await?;
    stream.reached(1).await?;
    let ttft_ms = sent.elapsed().as_secs_f64() * 1e3;
    Ok(Answer { number, is_burst, ttft_ms, text: stream.finish().await?.text })
}
