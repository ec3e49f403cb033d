//! A worker that ends while it answers, with all its streams.

use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::fleet::Fleet;
use super::request::Request;
use crate::stream::Stream;

/// Streams on the worker that ends.
pub(super) const N_STREAMS: u64 = 32;
/// Tokens that each stream has when its worker begins to end.
const FIRST_TOKENS: usize = 8;
/// Tokens that each stream must still have to go then.
const REST_TOKENS: usize = 64;
/// Prompts differ by so many tokens from one stream to the next.
const PROMPT_STEP_TOKENS: usize = 24;

/// What a drain gave.
#[derive(Debug)]
pub(super) struct Drained {
    /// From SIGTERM until the process has ended.
    pub(super) took: Duration,
    /// What each failed stream said.
    pub(super) failures: Vec<String>,
    /// Streams that went on with their KV.
    pub(super) n_moved: f64,
}

/// Ends the only worker of a fleet by SIGTERM while it has 32 streams, with another one beside it that came later;
/// outputs of `output_tokens` must be long enough that all go on when that is there.
///
/// # Errors
/// If a text is not that of the undisturbed run, or the worker does not end.
pub(super) async fn drain(fleet: &mut Fleet, output_tokens: usize) -> anyhow::Result<Drained> {
    let only = |fleet: &Fleet| fleet.numbers().first().copied().context("there is no worker");
    for number in fleet.numbers().split_off(1) {
        fleet.drain_worker(number).await?;
    }
    let leaving = only(fleet)?;
    let mut expected = Vec::new();
    for stream in open_all(fleet, "undisturbed", output_tokens).await? {
        expected.push(stream.finish().await.context("run 32 streams undisturbed")?.text);
    }
    let mut streams = open_all(fleet, "drained", output_tokens).await?;
    for stream in &mut streams {
        stream.reached(FIRST_TOKENS).await?;
    }
    fleet.start_worker(leaving + 1).await?;
    let n_running = streams.iter().filter(|stream| stream.n_events() < output_tokens - REST_TOKENS).count();
    ensure!(
        n_running == streams.len(),
        "{n_running} of {} streams still ran: outputs are too short",
        streams.len()
    );
    let n_moved_before = fleet.n_continued("moved").await?;
    let took = fleet.drain_worker(leaving).await?;
    let mut failures = Vec::new();
    for (number, (stream, expected)) in streams.into_iter().zip(&expected).enumerate() {
        match stream.finish().await {
            Err(error) => failures.push(format!("stream {number} of a drain: {error:#}")),
            Ok(recorded) => {
                ensure!(
                    recorded.text == *expected,
                    "the text of stream {number} is not that of its undisturbed run"
                );
            }
        }
    }
    Ok(Drained { took, failures, n_moved: fleet.n_continued("moved").await? - n_moved_before })
}

async fn open_all(fleet: &Fleet, salt: &str, output_tokens: usize) -> anyhow::Result<Vec<Stream>> {
    let mut streams = Vec::new();
    for number in 0..N_STREAMS {
        let request = Request {
            number,
            prompt_tokens: PROMPT_STEP_TOKENS * (1 + number as usize),
            output_tokens,
            is_sampled: number % 2 == 1,
        };
        let body = request.body(&format!("{salt}-{number}"), salt);
        streams.push(Stream::open(&fleet.http, &fleet.gateway, &body).await?);
    }
    Ok(streams)
}
