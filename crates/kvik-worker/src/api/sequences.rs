//! The generating paths, and `/sequences/...`: requests that come from another worker or go to one.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use kvik_model::{BLOCK_TOKENS, Staged};
use kvik_proto::journal::{CachedTokens, JOURNAL, JournalHead, MoveNotice, ProgressLine};
use kvik_proto::moves::{
    DECODE_AT, KV_CHECKSUM, KvTaken, MOVED, MoveRequest, MovedAnswer, Offer, OfferAnswer, ResumeHead,
    RunningSequences,
};
use kvik_tier::shared::checksum;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::answer::Head;
use super::journal::JournalWriter;
use super::outcome::{Collected, Outcomes, collect, empty_outcomes, write_partial};
use super::request::start;
use super::resume::Resumed;
use super::stream::{Renderer, respond};
use super::{Answer, Shared, chat, completions, inference, json, parse, read_body, read_json};
use crate::departure::{Departs, move_request};
use crate::engine_thread::StageBlocks;
use crate::error::Refusal;
use crate::generation::StageGuard;
use crate::moves::Arrival;
use crate::plan::{Form, GenerationPath, Plan};
use crate::running::{End, RequestProgress, RunningGuard, RunningRequest};
use crate::state::{Loaded, WorkerState};

/// Time for blocks that others have overtaken on their way here: a call that breaks off is not waited for longer.
const ORDER_WAIT: Duration = Duration::from_secs(1);

/// What is here of a sequence that is on its way, by prompt and choice.
type Stages = HashMap<(usize, u32), StageGuard>;

/// `POST /v1/completions`.
pub(super) async fn completions(state: Shared, request: Request) -> Answer {
    generation(state, GenerationPath::Completions, request).await
}

/// `POST /v1/chat/completions`.
pub(super) async fn chat(state: Shared, request: Request) -> Answer {
    generation(state, GenerationPath::Chat, request).await
}

/// `POST /inference/generate`.
pub(super) async fn generate(state: Shared, request: Request) -> Answer {
    generation(state, GenerationPath::Generate, request).await
}

async fn generation(State(state): Shared, path: GenerationPath, request: Request) -> Answer {
    let is_journaled = asks_for_journal(request.headers());
    let decode_at = request.headers().get(DECODE_AT).and_then(|base| base.to_str().ok());
    let decode_at = decode_at.map(str::to_owned).filter(|_| is_journaled);
    let body = read_body(&state, request).await?;
    let loaded = state.ready()?;
    let plan = plan(loaded, path, body).await?;
    let begins = Begins { decode_at, ..Begins::default() };
    answer(&state, loaded, &plan, is_journaled, begins).await
}

/// Where a request comes from and goes to.
#[derive(Debug, Default)]
struct Begins {
    /// What another worker has done of it.
    resumed: Option<Resumed>,
    /// KV that came ahead of it.
    stages: Vec<StageGuard>,
    /// The worker that goes on with it after its first token.
    decode_at: Option<String>,
}

/// `POST /sequences/resume`: goes on with a request that another worker has begun.
pub(super) async fn resume(State(state): Shared, request: Request) -> Answer {
    let is_journaled = asks_for_journal(request.headers());
    let body = read_body(&state, request).await?;
    let loaded = state.ready()?;
    let (head, body): (ResumeHead, Bytes) = split(&body)?;
    let path = GenerationPath::of(&head.path)?;
    // A ticket that is unknown, or of another request, only means that nothing went ahead.
    let arrival = head.ticket.as_deref().and_then(|ticket| loaded.arrivals.take(ticket));
    let arrival = arrival.filter(|arrival| arrival.plan.path == path && arrival.plan.body == body);
    loaded.metrics.resumed(arrival.is_some());
    let Some(arrival) = arrival else {
        let plan = plan(loaded, path, body).await?;
        let resumed = Resumed::read(&plan, head)?;
        let begins = Begins { resumed: Some(resumed), ..Begins::default() };
        return go_on(&state, loaded, &plan, is_journaled, begins).await;
    };
    let resumed = Some(Resumed::read(&arrival.plan, head)?);
    let stages = std::mem::take(&mut *arrival.stages.lock().await).into_values().collect();
    let begins = Begins { resumed, stages, decode_at: None };
    go_on(&state, loaded, &arrival.plan, is_journaled, begins).await
}

/// Goes on with a request: one whose client steps it waits for the next step, others are answered.
async fn go_on(
    state: &Arc<WorkerState>,
    loaded: &Arc<Loaded>,
    plan: &Plan,
    is_journaled: bool,
    begins: Begins,
) -> Answer {
    match begins {
        Begins { resumed: Some(resumed), stages, .. } if plan.path == GenerationPath::Init => {
            inference::resume(state, loaded, plan, &resumed, stages).await
        }
        begins => answer(state, loaded, plan, is_journaled, begins).await,
    }
}

fn asks_for_journal(headers: &HeaderMap) -> bool {
    headers.get(JOURNAL).is_some_and(|value| value == "1")
}

async fn plan(loaded: &Arc<Loaded>, path: GenerationPath, body: Bytes) -> Result<Plan, Refusal> {
    match path {
        GenerationPath::Completions => completions::plan(loaded, body).await,
        GenerationPath::Chat => chat::plan(loaded, body).await,
        GenerationPath::Generate => inference::plan(loaded, body).await,
        GenerationPath::Init => inference::plan_init(loaded, body).await,
    }
}

/// Starts or goes on with a request and answers it.
async fn answer(
    state: &Arc<WorkerState>,
    loaded: &Arc<Loaded>,
    plan: &Plan,
    is_journaled: bool,
    begins: Begins,
) -> Answer {
    let Begins { resumed, stages, decode_at } = begins;
    let begun = resumed.as_ref().map(|resumed| resumed.begun(plan)).unwrap_or_default();
    let seeds = resumed.as_ref().map(|resumed| resumed.head.seeds.clone()).unwrap_or_default();
    let outcomes =
        resumed.as_ref().filter(|_| plan.form == Form::Whole).map(|resumed| resumed.outcomes(plan));
    let outcomes = outcomes.transpose()?;
    let generation = start(state, loaded, plan, begun, &seeds, stages).await?;
    let head = match &resumed {
        None => Head::new(state, loaded, plan),
        Some(resumed) => Head::of(loaded, plan, resumed.head.id.clone(), resumed.head.created),
    };
    let journal_head = JournalHead {
        sequence: state.new_id("seq-"),
        id: head.id.clone(),
        created: head.created,
        seeds: generation.seeds(),
    };
    let mut running = loaded.running.insert(RunningRequest {
        id: journal_head.sequence.clone(),
        seq_id: plan.seq_id.clone(),
        path: plan.path.as_str(),
        body: if is_journaled { plan.body.clone() } else { Bytes::new() },
        prompt_tokens: plan.prompts.iter().map(Vec::len).collect(),
        n_choices: plan.sampling.n,
        max_tokens: plan.sampling.max_tokens as usize,
        tickets: generation.tickets(),
        engine: loaded.engine.clone(),
        can_move: is_journaled,
        draining: state.draining.clone(),
        came: resumed.as_ref().map(|_| std::time::Instant::now()),
        progress: RequestProgress::new(resumed.as_ref().map_or(0, Resumed::n_output_tokens)),
    });
    if let Some(to) = decode_at {
        give_away(state, loaded, &mut running, to);
    }
    let includes_usage = match plan.form {
        Form::Whole => {
            let n_choices = plan.sampling.n as usize;
            let outcomes = outcomes.unwrap_or_else(|| empty_outcomes(plan.prompts.len(), n_choices));
            return match collect(generation, outcomes, running).await? {
                Collected::Whole(outcomes) => Ok(whole(plan, head, outcomes)),
                Collected::Frozen(outcomes, notice) => Ok(moved(plan, journal_head, &outcomes, notice)),
            };
        }
        Form::Stream { includes_usage } => includes_usage,
    };
    let journal = is_journaled.then(|| JournalWriter::new(plan, journal_head));
    let resumed = resumed.as_ref();
    Ok(match plan.path {
        GenerationPath::Completions => {
            let renderer = completions::renderer(plan, head, includes_usage);
            stream(plan, generation, renderer, resumed, journal, running)
        }
        GenerationPath::Chat => {
            let renderer = chat::renderer(plan, head, includes_usage);
            stream(plan, generation, renderer, resumed, journal, running)
        }
        // Sequences that are stepped have no stream, and do not come here.
        GenerationPath::Generate | GenerationPath::Init => {
            stream(plan, generation, inference::renderer(), resumed, journal, running)
        }
    })
}

/// Has a request go on at the worker at `to` after its first token; it stays here if that does not take it.
fn give_away(state: &Arc<WorkerState>, loaded: &Arc<Loaded>, running: &mut RunningGuard, to: String) {
    let Some(guard) = running.begin_move().filter(|_| to.trim_end_matches('/') != state.base) else { return };
    let (state, loaded) = (Arc::clone(state), Arc::clone(loaded));
    let mut count = MoveCount { request: Arc::clone(guard.request()), loaded, has_moved: false };
    running.own(tokio::spawn(async move {
        match move_request(&state, &count.loaded, &guard, &to, Departs::AfterFirstToken).await {
            Ok(_) => count.note_moved(),
            Err(refusal) => {
                tracing::debug!(%to, ?refusal, "a request stays with the worker that computed its prompt");
            }
        }
    }));
}

/// Counts a move when its task ends. The task may be aborted right after the request was frozen, because its stream ended
/// with the notice to the gateway: the request itself then says that it has moved.
struct MoveCount {
    request: Arc<RunningRequest>,
    loaded: Arc<Loaded>,
    has_moved: bool,
}

impl MoveCount {
    fn note_moved(&mut self) {
        self.has_moved = true;
    }
}

impl Drop for MoveCount {
    fn drop(&mut self) {
        self.loaded.metrics.moved(self.has_moved || self.request.has_migrated());
    }
}

fn stream<R: Renderer>(
    plan: &Plan,
    generation: crate::generation::Generation,
    mut renderer: R,
    resumed: Option<&Resumed>,
    journal: Option<JournalWriter>,
    running: RunningGuard,
) -> Response {
    if let Some(resumed) = resumed {
        resumed.skip(plan, &mut renderer);
    }
    respond(generation, renderer, journal, running)
}

fn whole(plan: &Plan, head: Head, outcomes: Outcomes) -> Response {
    match plan.path {
        GenerationPath::Chat => json(StatusCode::OK, &chat::whole(plan, head, outcomes)),
        _ => json(StatusCode::OK, &completions::whole(plan, head, outcomes)),
    }
}

/// The answer to a request without a stream that goes on elsewhere.
fn moved(plan: &Plan, head: JournalHead, outcomes: &Outcomes, notice: Option<MoveNotice>) -> Response {
    let mut line = ProgressLine::default();
    for (part_idx, part) in outcomes.iter().enumerate() {
        for (choice, outcome) in part.iter().enumerate() {
            let number = plan.output_number(part_idx, choice as u32);
            outcome.tokens.iter().for_each(|token| line.token(number, *token));
            if !outcome.finish_reason.is_empty() {
                line.end(number);
            }
            if choice == 0 && !outcome.tokens.is_empty() {
                let cached =
                    CachedTokens { n_tokens: outcome.usage.cached_tokens, tiers: outcome.usage.tiers };
                line.cached(part_idx as u32, cached);
            }
        }
    }
    let notice = notice.unwrap_or_else(|| MoveNotice { ticket: String::new(), to: String::new() });
    let answer = MovedAnswer {
        ticket: notice.ticket,
        to: notice.to,
        head,
        progress: line.into_items(),
        partial: write_partial(outcomes),
    };
    let mut response = json(StatusCode::OK, &answer);
    response.headers_mut().insert(MOVED, HeaderValue::from_static("1"));
    response
}

/// `GET /sequences`.
pub(super) async fn list(State(state): Shared) -> Answer {
    let sequences = state.loaded()?.running.list();
    Ok(json(StatusCode::OK, &RunningSequences { sequences }))
}

/// `POST /sequences/{id}/move`: answers when the request is frozen and its KV is at the other worker.
pub(super) async fn begin_move(State(state): Shared, Path(id): Path<String>, request: Request) -> Answer {
    let MoveRequest { to } = read_json(&state, request).await?;
    let loaded = Arc::clone(state.loaded()?);
    let running = loaded.running.find(&id).ok_or_else(|| unknown(&id))?;
    if !running.can_move {
        let message = "the request did not come through a gateway that could continue it elsewhere";
        return Err(Refusal::conflict(message, None));
    }
    if to.trim_end_matches('/') == state.base {
        return Err(Refusal::field("to", format!("`{to}`"), "the address of another worker"));
    }
    let guard = running.begin_move().ok_or_else(|| Refusal::conflict("the request moves already", None))?;
    // A task of its own: a caller that leaves must not leave a request half moved.
    let moving = tokio::spawn(async move {
        let outcome = move_request(&state, &loaded, &guard, &to, Departs::Soon).await;
        loaded.metrics.moved(outcome.is_ok());
        outcome
    });
    let moved = moving.await.map_err(|_| Refusal::failed("the move has failed"))??;
    Ok(json(StatusCode::OK, &moved))
}

/// `POST /sequences/{id}/thaw`.
pub(super) async fn thaw(State(state): Shared, Path(id): Path<String>) -> Answer {
    let loaded = state.loaded()?;
    let running = loaded.running.find(&id).ok_or_else(|| unknown(&id))?;
    running.note_end(End::Left);
    loaded.running.forget_ticket(&running);
    running.engine.thaw(running.tickets.clone());
    Ok(json(StatusCode::OK, &serde_json::json!({"id": running.id})))
}

/// `POST /sequences/moves`.
pub(super) async fn offer(State(state): Shared, request: Request) -> Answer {
    let body = read_body(&state, request).await?;
    let loaded = state.ready()?;
    let (offer, body): (Offer, Bytes) = split(&body)?;
    let is_ticket = offer.ticket.len() == 32 && offer.ticket.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !is_ticket {
        return Err(Refusal::field("ticket", format!("`{}`", offer.ticket), "32 hexadecimal digits"));
    }
    let own = (&loaded.root, &loaded.layout, loaded.block_layer_bytes);
    if (&offer.root, &offer.layout, offer.block_layer_bytes) != own {
        let message = "the KV of the two workers differs: model, dtype or layout";
        return Err(Refusal::conflict(message, Some("root")));
    }
    let plan = plan(loaded, GenerationPath::of(&offer.path)?, body).await?;
    let mut stages = Stages::new();
    let mut have_blocks = Vec::new();
    for (part, prompt) in plan.prompts.iter().enumerate() {
        let guard = StageGuard::begin(&loaded.engine, prompt, plan.salt.clone()).await?;
        have_blocks.push(guard.n_first);
        stages.insert((part, 0), guard);
    }
    tracing::debug!(from = %offer.from, "a request may come");
    let arrival = Arrival { plan, from: offer.from, stages: stages.into(), taken: Notify::new() };
    loaded.arrivals.insert(&offer.ticket, arrival)?;
    Ok(json(StatusCode::OK, &OfferAnswer { have_blocks }))
}

#[derive(Debug, Deserialize)]
struct BlocksQuery {
    part: usize,
    choice: u32,
    first_block: usize,
}

/// `PUT /sequences/moves/{ticket}/kv`.
pub(super) async fn put_blocks(State(state): Shared, Path(ticket): Path<String>, request: Request) -> Answer {
    let query = axum::extract::Query::<BlocksQuery>::try_from_uri(request.uri())
        .map_err(|error| Refusal::invalid(format!("the query cannot be read: {error}"), None))?
        .0;
    let given = request.headers().get(KV_CHECKSUM).and_then(|value| value.to_str().ok()?.parse_hex());
    let body = read_body(&state, request).await?;
    let loaded = state.loaded()?;
    if given != Some(checksum(&body).0) {
        return Err(Refusal::field(KV_CHECKSUM, "not that of the body", "the body's CRC-64/NVME"));
    }
    let arrival = loaded.arrivals.get(&ticket).ok_or_else(|| unknown(&ticket))?;
    let plan = &arrival.plan;
    let Some(prompt) = plan.prompts.get(query.part).filter(|_| query.choice < plan.sampling.n) else {
        return Err(Refusal::field("part", query.part, "a prompt and choice of the request"));
    };
    let (tokens, kv) = blocks(&body)?;
    let first_token = query.first_block.saturating_mul(BLOCK_TOKENS);
    if prompt.iter().skip(first_token).zip(&tokens).any(|(own, given)| own != given) {
        return Err(Refusal::conflict("the tokens are not those of the request", None));
    }
    let place = (query.part, query.choice);
    let until = Instant::now() + ORDER_WAIT;
    let mut stages = arrival.stages.lock().await;
    if let Entry::Vacant(vacant) = stages.entry(place) {
        vacant.insert(StageGuard::begin(&loaded.engine, prompt, plan.salt.clone()).await?);
    }
    // Calls may overtake each other on their way here.
    while stages.get(&place).is_some_and(|guard| guard.n_sent < query.first_block) {
        let taken = arrival.taken.notified();
        drop(stages);
        let is_late = tokio::time::timeout_at(until, taken).await.is_err();
        stages = arrival.stages.lock().await;
        if is_late {
            break;
        }
    }
    let guard = stages.get_mut(&place).ok_or_else(|| unknown(&ticket))?;
    let end_block = query.first_block.saturating_add(tokens.len() / BLOCK_TOKENS);
    let blocks = StageBlocks {
        stage: Some(guard.stage),
        prompt: Vec::new(),
        salt: None,
        first_block: query.first_block,
        tokens,
        kv,
    };
    // The engine takes blocks in this order. Of those that it has no room for, and of all behind, it takes none.
    let staging = loaded.engine.begin_stage(blocks)?;
    if query.first_block <= guard.n_sent {
        guard.n_sent = guard.n_sent.max(end_block);
    }
    drop(stages);
    arrival.taken.notify_waiters();
    let Staged { n_blocks, is_full } = staging.await?.staged;
    Ok(json(StatusCode::OK, &KvTaken { have_blocks: n_blocks, is_full }))
}

/// `DELETE /sequences/moves/{ticket}`.
pub(super) async fn forget(State(state): Shared, Path(ticket): Path<String>) -> Answer {
    let arrival = state.loaded()?.arrivals.take(&ticket);
    if let Some(arrival) = &arrival {
        tracing::debug!(from = %arrival.from, "a request does not come");
    }
    Ok(json(StatusCode::OK, &serde_json::json!({"forgotten": arrival.is_some()})))
}

/// The JSON in the first line of a body, and the rest.
fn split<T: DeserializeOwned>(body: &Bytes) -> Result<(T, Bytes), Refusal> {
    let Some(end) = body.iter().position(|byte| *byte == b'\n') else {
        return Err(Refusal::invalid("the body has no line of JSON before the request", None));
    };
    Ok((parse(&body[..end])?, body.slice(end + 1..)))
}

/// The tokens of blocks, and their bytes.
fn blocks(body: &Bytes) -> Result<(Vec<u32>, Bytes), Refusal> {
    let short = || Refusal::invalid("the body is shorter than the tokens that it announces", None);
    let (n_tokens, rest) = body.split_first_chunk::<4>().ok_or_else(short)?;
    let n_bytes = (u32::from_le_bytes(*n_tokens) as usize).saturating_mul(4);
    let tokens = rest.get(..n_bytes).ok_or_else(short)?;
    let tokens = tokens.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    Ok((tokens, body.slice(4 + n_bytes..)))
}

fn unknown(name: &str) -> Refusal {
    let shown: String = name.chars().take(100).collect();
    Refusal::not_found(format!("`{shown}` is not known here"), None)
}

/// Reads a number of hexadecimal digits.
trait ParseHex {
    fn parse_hex(&self) -> Option<u64>;
}

impl ParseHex for str {
    fn parse_hex(&self) -> Option<u64> {
        u64::from_str_radix(self, 16).ok()
    }
}
