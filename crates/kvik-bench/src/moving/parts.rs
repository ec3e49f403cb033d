//! Streams beside long prompts, on two workers with roles and on two that do everything.
//!
//! Some streams generate while long prompts come, one after the other. What is measured is the time between two tokens of the streams,
//! and how long the prompts wait for their first token. Both fleets get the same requests, and their texts must be the same.

use std::ops::Range;
use std::time::Instant;

use anyhow::ensure;

use super::fleet::Fleet;
use super::request::Request;
use crate::stream::Stream;

/// Streams that generate.
pub(super) const N_STREAMS: u64 = 4;
/// Tokens of their prompts.
const STREAM_PROMPT_TOKENS: usize = 64;
/// Tokens of each stream before the first long prompt.
const FIRST_TOKENS: usize = 8;
/// Tokens that are generated after a long prompt.
const ANSWER_TOKENS: usize = 64;
/// Numbers of the requests with long prompts begin here.
const FIRST_PROMPT: u64 = 1000;

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// Tokens of each stream.
    pub(super) stream_tokens: usize,
    /// Long prompts.
    pub(super) n_prompts: u64,
    /// Tokens of each.
    pub(super) prompt_tokens: usize,
}

/// What it gave.
#[derive(Debug, Default)]
pub(super) struct Beside {
    /// Times between two tokens of the streams, of which the second came while a long prompt was computed.
    pub(super) gaps_ms: Vec<f64>,
    /// For each long prompt.
    pub(super) first_token_ms: Vec<f64>,
    /// Of all requests.
    pub(super) texts: Vec<String>,
    /// Requests that moved.
    pub(super) n_moved: f64,
}

/// Runs the load on a fleet; `salt` keeps its KV apart from that of other runs.
///
/// # Errors
/// If a stream fails, or no stream ran beside the prompts.
pub(super) async fn run(fleet: &Fleet, load: Load, salt: &str) -> anyhow::Result<Beside> {
    let n_moved_before = fleet.n_continued("moved").await?;
    let open = async |request: Request, kind: &str| {
        let name = format!("{salt}-{kind}-{}", request.number);
        Stream::open(&fleet.http, &fleet.gateway, &request.body(&name, &name)).await
    };
    let mut streams = Vec::new();
    for number in 0..N_STREAMS {
        let output_tokens = load.stream_tokens;
        let is_sampled = number % 2 == 1;
        let request = Request { number, prompt_tokens: STREAM_PROMPT_TOKENS, output_tokens, is_sampled };
        streams.push(open(request, "stream").await?);
    }
    for stream in &mut streams {
        stream.reached(FIRST_TOKENS).await?;
    }
    let mut beside = Beside::default();
    let mut computed: Vec<Range<Instant>> = Vec::new();
    for number in FIRST_PROMPT..FIRST_PROMPT + load.n_prompts {
        let prompt_tokens = load.prompt_tokens;
        let request = Request { number, prompt_tokens, output_tokens: ANSWER_TOKENS, is_sampled: false };
        let sent = Instant::now();
        let recorded = open(request, "prompt").await?.finish().await?;
        computed.extend(recorded.times.first().map(|at| sent..*at));
        beside.texts.push(recorded.text);
    }
    beside.first_token_ms =
        computed.iter().map(|prompt| (prompt.end - prompt.start).as_secs_f64() * 1e3).collect();
    for stream in streams {
        let recorded = stream.finish().await?;
        let pairs =
            recorded.times.windows(2).filter(|pair| computed.iter().any(|prompt| prompt.contains(&pair[1])));
        beside.gaps_ms.extend(pairs.map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3));
        beside.texts.push(recorded.text);
    }
    ensure!(!beside.gaps_ms.is_empty(), "no stream ran beside the prompts: outputs are too short");
    beside.n_moved = fleet.n_continued("moved").await? - n_moved_before;
    Ok(beside)
}
