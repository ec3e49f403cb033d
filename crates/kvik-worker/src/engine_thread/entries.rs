//! The requests that the engine has, as its thread sees them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvik_model::RequestId;
use kvik_proto::openai::CachedTiers;
use kvik_tier::TierKind;

use super::{BegunPart, Origin};
use crate::events::Event;
use crate::store::ChunkTiers;

/// A request that the engine has.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) id: RequestId,
    pub(super) origin: Origin,
    /// For each choice: tokens sent and when the last one was.
    choices: Vec<Choice>,
    n_live_choices: usize,
    n_granted: u64,
    chunks: ChunkTiers,
    cached_tiers: CachedTiers,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    /// When the client last read or the output last grew.
    progressed: Instant,
    is_frozen: bool,
}

#[derive(Debug, Clone, Copy)]
struct Choice {
    n_sent: u64,
    last_sent: Option<Instant>,
}

/// All of them, by ticket and by the engine's id.
#[derive(Debug, Default)]
pub(super) struct Entries {
    by_ticket: HashMap<u64, Entry>,
    tickets: HashMap<RequestId, u64>,
}

/// How long a token took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum TokenTime {
    /// The first token of the request.
    First { since_arrival: Duration, since_admission: Duration },
    /// Since the token before it in its output.
    Next(Duration),
    /// The first token of another choice, which was chosen together with that of the first.
    Unmeasured,
}

/// How long a request took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RequestTime {
    pub(super) since_arrival: Duration,
    pub(super) since_first_token: Duration,
}

impl Entry {
    pub(super) fn new(id: RequestId, origin: Origin, n_choices: usize, chunks: ChunkTiers) -> Self {
        Self {
            id,
            choices: vec![Choice { n_sent: 0, last_sent: None }; n_choices],
            n_live_choices: n_choices,
            n_granted: u64::from(origin.credits),
            chunks,
            cached_tiers: CachedTiers::default(),
            admitted: None,
            first_token: None,
            progressed: origin.arrived,
            is_frozen: false,
            origin,
        }
    }

    /// Notes what another worker has done: outputs that have ended and where the cached tokens were.
    pub(super) fn note_begun(&mut self, begun: &BegunPart) {
        let n_ended = begun.outputs.outputs.iter().filter(|output| output.is_ended).count();
        self.n_live_choices -= n_ended;
        self.cached_tiers = begun.tiers;
    }

    /// Notes that it waits to go on here or elsewhere: it is not its client that keeps it waiting.
    pub(super) fn set_frozen(&mut self, is_frozen: bool, now: Instant) {
        self.is_frozen = is_frozen;
        self.progressed = now;
    }

    /// Gives its place back, and then sends its last event: a receiver of that finds the place free.
    pub(super) fn send_last(self, event: Event) {
        let Origin { part_idx, events, permit, .. } = self.origin;
        drop(permit);
        let _ = events.send((part_idx, event));
    }

    /// Sends an event; one without a receiver is followed by the request's end.
    pub(super) fn send(&self, event: Event) {
        let _ = self.origin.events.send((self.origin.part_idx, event));
    }

    pub(super) fn grant(&mut self, n: u32, now: Instant) {
        self.n_granted += u64::from(n);
        self.progressed = now;
    }

    /// Whether an output waits for its client since before `deadline`.
    pub(super) fn is_stalled_since(&self, deadline: Instant) -> bool {
        let is_paused = self.choices.iter().any(|choice| self.n_granted <= choice.n_sent);
        !self.origin.is_stepped && !self.is_frozen && is_paused && self.progressed < deadline
    }

    /// Notes the start of the first step that has the request; the time since its arrival.
    pub(super) fn note_admitted(&mut self, now: Instant) -> Duration {
        self.admitted = Some(now);
        now.saturating_duration_since(self.origin.arrived)
    }

    /// Notes where the cached tokens of the prompt came from: `loaded_tokens` of them from the store, the others were in the
    /// engine.
    pub(super) fn note_cached(&mut self, cached_tokens: usize, loaded_tokens: usize) -> CachedTiers {
        let n_found = cached_tokens.saturating_sub(loaded_tokens);
        let mut tiers = CachedTiers { engine: n_found, ..CachedTiers::default() };
        let (chunks, loaded) = match std::mem::take(&mut self.chunks) {
            // What was there before came first, and then these.
            ChunkTiers::Loaded(chunks) => (chunks, n_found..cached_tokens),
            ChunkTiers::Taken(taken) => (std::mem::take(&mut *taken.lock()), 0..usize::MAX),
        };
        for (tokens, tier) in chunks {
            let n_tokens = tokens.end.min(loaded.end).saturating_sub(tokens.start.max(loaded.start));
            *match tier {
                TierKind::Ram => &mut tiers.ram,
                TierKind::Nvme => &mut tiers.nvme,
                TierKind::Peer => &mut tiers.peer,
                TierKind::Redis => &mut tiers.redis,
                TierKind::Object => &mut tiers.object,
                TierKind::Lm => &mut tiers.lm,
                TierKind::Plugin => &mut tiers.plugin,
            } += n_tokens;
        }
        self.cached_tiers = tiers;
        tiers
    }

    /// Where the cached tokens of the prompt came from.
    pub(super) fn cached_tiers(&self) -> CachedTiers {
        self.cached_tiers
    }

    pub(super) fn note_token(&mut self, choice: u32, now: Instant) -> TokenTime {
        self.progressed = now;
        let arrived = self.origin.arrived;
        let admitted = self.admitted.unwrap_or(arrived);
        self.first_token.get_or_insert(now);
        let Some(state) = self.choices.get_mut(choice as usize) else { return TokenTime::Unmeasured };
        state.n_sent += 1;
        match state.last_sent.replace(now) {
            Some(before) => TokenTime::Next(now - before),
            None if choice == 0 => {
                TokenTime::First { since_arrival: now - arrived, since_admission: now - admitted }
            }
            None => TokenTime::Unmeasured,
        }
    }

    /// Whether one of its tokens was chosen here.
    pub(super) fn has_tokens(&self) -> bool {
        self.first_token.is_some()
    }

    /// Notes the end of an output; what the request took after the last one.
    pub(super) fn note_finished(&mut self, now: Instant) -> Option<RequestTime> {
        self.n_live_choices = self.n_live_choices.saturating_sub(1);
        let since_first_token = self.first_token.map_or(Duration::ZERO, |first_token| now - first_token);
        (self.n_live_choices == 0)
            .then(|| RequestTime { since_arrival: now - self.origin.arrived, since_first_token })
    }
}

impl Entries {
    pub(super) fn insert(&mut self, entry: Entry) {
        self.tickets.insert(entry.id, entry.origin.ticket);
        self.by_ticket.insert(entry.origin.ticket, entry);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_ticket.is_empty()
    }

    pub(super) fn get_mut(&mut self, ticket: u64) -> Option<&mut Entry> {
        self.by_ticket.get_mut(&ticket)
    }

    pub(super) fn of_request(&mut self, id: RequestId) -> Option<(u64, &mut Entry)> {
        let ticket = *self.tickets.get(&id)?;
        Some((ticket, self.by_ticket.get_mut(&ticket)?))
    }

    pub(super) fn remove(&mut self, ticket: u64) -> Option<Entry> {
        let entry = self.by_ticket.remove(&ticket)?;
        self.tickets.remove(&entry.id);
        Some(entry)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Entry)> {
        self.by_ticket.iter().map(|(&ticket, entry)| (ticket, entry))
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = Entry> {
        self.tickets.clear();
        self.by_ticket.drain().map(|(_, entry)| entry)
    }
}
