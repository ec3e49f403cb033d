//! How long a stream pauses while it goes to another worker.
//!
//! Each request runs twice, under one cache salt, so that the second run finds its prompt where the first ran. The first
//! run is not disturbed: the 99th percentile of its times between tokens is what the stream pauses anyway, and its
//! text is what the second run must give. The second run is moved to and fro, or loses its worker. A pause is the longest time between two tokens around
//! that, less what the stream pauses anyway.

use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::fleet::Fleet;
use super::request::Request;
use crate::stream::{Stream, gaps_ms, percentile};

/// Tokens before the first disturbance.
const FIRST_TOKENS: usize = 32;
/// Tokens behind a disturbance that belong to it.
const SETTLE_TOKENS: usize = 8;
/// Tokens of a stream for each of its moves: those around it, those up to the end of a token block, and those of the copy.
const TOKENS_PER_MOVE: usize = 48;
/// Tokens of a stream that loses its worker.
const REPLAY_TOKENS: usize = 96;

/// What moves of sequences of one length gave.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// One for each move.
    pub(super) pauses_ms: Vec<f64>,
    /// Of each move whose KV the destination had nothing of: bytes that were copied while the sequence ran, and the time.
    pub(super) copies: Vec<(u64, Duration)>,
}

/// Moves `n_streams` streams of about `length` tokens, each `n_moves` times.
///
/// # Errors
/// If a text is not that of the undisturbed run, or a stream fails.
pub(super) async fn moves(
    fleet: &Fleet,
    length: usize,
    n_streams: u64,
    n_moves: usize,
) -> anyhow::Result<Moves> {
    let output_tokens = 2 * FIRST_TOKENS + n_moves * TOKENS_PER_MOVE;
    let mut moves = Moves::default();
    for number in 0..n_streams {
        let run = Run::begin(fleet, "move", number, length, output_tokens).await?;
        let mut stream = run.open(fleet).await?;
        let mut at = fleet.number_of(&stream.worker)?;
        let mut windows = Vec::with_capacity(n_moves);
        stream.reached(FIRST_TOKENS).await?;
        for move_idx in 0..n_moves {
            let (first, to) = (stream.n_events(), fleet.other_than(at)?);
            let Some(moved) = fleet.move_sequence(&run.name, at, to).await? else { break };
            if move_idx == 0 {
                moves.copies.push((moved.copied_bytes, Duration::from_secs_f64(moved.copy_ms / 1e3)));
            }
            let last = stream.n_events() + SETTLE_TOKENS;
            if !stream.reached(last).await? {
                break;
            }
            windows.push((first, last));
            at = to;
        }
        let recorded = run.finish(stream).await?;
        moves.pauses_ms.extend(windows.iter().map(|window| run.pause_ms(&recorded, *window)));
    }
    Ok(moves)
}

/// Kills the worker of `n_streams` streams of about `length` tokens, one after the other; the pauses in milliseconds.
///
/// # Errors
/// If a text is not that of the undisturbed run, or a stream fails.
pub(super) async fn replays(fleet: &mut Fleet, length: usize, n_streams: u64) -> anyhow::Result<Vec<f64>> {
    let mut pauses_ms = Vec::new();
    for number in 0..n_streams {
        let run = Run::begin(fleet, "replay", number, length, REPLAY_TOKENS).await?;
        let mut stream = run.open(fleet).await?;
        stream.reached(FIRST_TOKENS).await?;
        let (first, worker) = (stream.n_events(), fleet.number_of(&stream.worker)?);
        fleet.kill_worker(worker);
        // More may have been on its way than the disturbance lets come; all the rest belongs to it.
        let recorded = run.finish(stream).await?;
        pauses_ms.push(run.pause_ms(&recorded, (first, REPLAY_TOKENS)));
        fleet.start_worker(worker).await?;
    }
    Ok(pauses_ms)
}

/// A request whose undisturbed run is known.
struct Run {
    request: Request,
    name: String,
    text: String,
    /// 99th percentile of its own times between tokens.
    own_p99_ms: f64,
}

impl Run {
    async fn begin(
        fleet: &Fleet,
        kind: &str,
        number: u64,
        length: usize,
        output_tokens: usize,
    ) -> anyhow::Result<Self> {
        let prompt_tokens = length.saturating_sub(output_tokens / 2).max(1);
        let request = Request { number, prompt_tokens, output_tokens, is_sampled: number % 2 == 1 };
        let mut run =
            Self { request, name: format!("{kind}-{length}-{number}"), text: String::new(), own_p99_ms: 0.0 };
        let recorded = run.open(fleet).await?.finish().await.context("run a stream undisturbed")?;
        run.own_p99_ms = percentile(&gaps_ms(&recorded.times), 0.99);
        run.text = recorded.text;
        Ok(run)
    }

    async fn open(&self, fleet: &Fleet) -> anyhow::Result<Stream> {
        Stream::open(&fleet.http, &fleet.gateway, &self.request.body(&self.name, &self.name)).await
    }

    /// Reads a disturbed stream to its end and compares its text; the times between its tokens.
    async fn finish(&self, stream: Stream) -> anyhow::Result<Vec<f64>> {
        let recorded = stream.finish().await.with_context(|| format!("read {} to its end", self.name))?;
        ensure!(recorded.text == self.text, "the text of {} is not that of its undisturbed run", self.name);
        Ok(gaps_ms(&recorded.times))
    }

    /// The longest gap of a window of events, less the stream's own.
    fn pause_ms(&self, gaps_ms: &[f64], (first, last): (usize, usize)) -> f64 {
        let window = gaps_ms.iter().take(last).skip(first.saturating_sub(1));
        let longest = window.copied().fold(0.0, f64::max);
        (longest - self.own_p99_ms).max(0.0)
    }
}
