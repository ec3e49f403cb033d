//! What the index says of a request's prompt before a worker is chosen.
//!
//! The index is asked within a short time or not at all: a tokenizer that is busy, a prompt that cannot be
//! read, a server that is away, all leave the choice to the ring.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvik_indexer::{Indexer, WorkerScore, is_same_worker};
use xxhash_rust::xxh3::Xxh3;

use crate::config::{RoutingConfig, millis};
use crate::metrics::Metrics;
use crate::placement::prediction::{LookedUp, Prediction};
use crate::placement::under_way::{PromptBlocks, UnderWay};
use crate::request::peek::Peek;
use crate::request::prompt::prompt_of;
use crate::request::routing_key::tagged;
use crate::route::Route;
use crate::state::Shared;
use crate::upstream::backend::{Backend, BackendKind};
use crate::upstream::fleet::ModelGroup;

/// Tokens beyond what is known that make a prompt's key: a usual block.
const KEY_TOKENS: usize = 16;

/// Which workers have how much of a prompt.
#[derive(Debug)]
pub(crate) struct Lookup {
    indexer: Arc<Indexer>,
    prompt: Arc<LookedUp>,
    /// Whether these are all tokens of the prompt.
    is_whole: bool,
    blocks: PromptBlocks,
    found: BTreeMap<String, WorkerScore>,
}

impl Lookup {
    /// Asks the index; `None` if it has nothing to say.
    pub(crate) async fn ask(
        shared: &Shared,
        group: &ModelGroup,
        route: Route,
        peek: &Peek<'_>,
        config: &RoutingConfig,
    ) -> Option<Self> {
        let indexer = shared.indexer.as_ref().filter(|_| config.kv_aware)?;
        if group.seats.len() < 2 || !indexer.knows(&group.model) {
            return None;
        }
        let prompt = prompt_of(route, peek)?;
        let salt = peek.cache_salt.as_deref();
        let asking = async {
            let (tokens, is_whole) = indexer.tokenize_for_routing(&group.model, prompt).await?;
            let found = indexer.find(&group.model, &tokens, salt).await?;
            Ok::<_, kvik_indexer::IndexerError>((tokens, is_whole, found))
        };
        let (outcome, lookup) = match tokio::time::timeout(millis(config.max_lookup_ms), asking).await {
            Err(_) => ("slow", None),
            Ok(Err(error)) => {
                tracing::debug!(model = %group.model, %error, "the index was not asked");
                ("failed", None)
            }
            Ok(Ok((tokens, is_whole, found))) => {
                let outcome = if found.is_empty() { "nothing" } else { "found" };
                let blocks = PromptBlocks::new(&tokens, salt);
                let prompt = Arc::new(LookedUp { tokens, salt: salt.map(str::to_owned) });
                (outcome, Some(Self { indexer: Arc::clone(indexer), prompt, is_whole, blocks, found }))
            }
        };
        Metrics::lookup(outcome);
        lookup
    }

    /// Tokens of prefill that each member saves, by its seat: what it has, or what is under way to it.
    pub(crate) fn saved_tokens(&self, group: &ModelGroup, under_way: &UnderWay) -> Vec<f64> {
        let backends = || group.seats.iter().map(|seat| &seat.backend);
        let saved = |backend: &Arc<Backend>| self.of(backend).map_or(0.0, |(_, found)| found.saved_tokens);
        let mut saved: Vec<f64> = backends().map(saved).collect();
        under_way.raise(&self.blocks, backends(), &mut saved);
        saved
    }

    /// Tokens of the prompt; `None` if only its beginning was looked up.
    pub(crate) fn prompt_tokens(&self) -> Option<u64> {
        self.is_whole.then_some(self.prompt.tokens.len() as u64)
    }

    /// Tokens from the first on that a backend has in some tier.
    pub(crate) fn matched_tokens(&self, backend: &Backend) -> u64 {
        self.of(backend).map_or(0, |(_, found)| found.matched_tokens)
    }

    /// The blocks of the prompt.
    pub(crate) fn blocks(&self) -> &PromptBlocks {
        &self.blocks
    }

    /// The prompt up to the first block that no worker has, as a key for the ring: prompts that share a beginning which
    /// is known already would otherwise all go to the owner of that beginning.
    /// `None` if no worker has anything.
    pub(crate) fn key(&self) -> Option<Vec<u8>> {
        let n_known = self.found.values().map(|found| found.matched_tokens).max()? as usize;
        let LookedUp { tokens, salt } = &*self.prompt;
        let n_tokens = (n_known + KEY_TOKENS).min(tokens.len());
        let mut hasher = Xxh3::new();
        for token in &tokens[..n_tokens] {
            hasher.update(&token.to_le_bytes());
        }
        if let Some(salt) = salt {
            hasher.update(salt.as_bytes());
        }
        Some(tagged(b'b', &hasher.digest().to_le_bytes()).into_owned())
    }

    /// What the report of a backend is compared with later; `None` if it has nothing of the prompt, or if only the
    /// beginning of the prompt was looked up.
    pub(crate) fn prediction(&self, model: &str, backend: &Backend) -> Option<Prediction> {
        let (worker, found) = self.of(backend).filter(|_| self.is_whole)?;
        let prompt = Arc::clone(&self.prompt);
        Some(Prediction::new(Arc::clone(&self.indexer), model, worker, prompt, found.matched_tokens))
    }

    /// What the index knows of a backend, and under which name.
    fn of(&self, backend: &Backend) -> Option<(&String, &WorkerScore)> {
        self.found.get_key_value(&backend.id).or_else(|| match backend.kind {
            BackendKind::Worker => None,
            // Engines are known by the address that their events came with.
            BackendKind::OpenAi => {
                self.found.iter().find(|(worker, _)| is_same_worker(worker, &backend.base))
            }
        })
    }
}
