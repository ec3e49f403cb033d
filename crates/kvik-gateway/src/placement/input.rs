//! What decides where a request goes: read the same way for a request that is sent, one that is explained and one that
//! another data plane sends.

use http::HeaderMap;
use kvik_index::placement::Request;

use crate::config::RoutingConfig;
use crate::placement::Wanted;
use crate::placement::lookup::Lookup;
use crate::request::peek::Peek;
use crate::request::routing_key::{estimated_prompt_tokens, is_prompt_key, routing_key};
use crate::route::Route;
use crate::state::Shared;
use crate::upstream::fleet::ModelGroup;

/// What decides where a request goes within a group.
#[derive(Debug)]
pub(crate) struct RouteInput {
    key: Vec<u8>,
    /// Whether the key is the name of a sequence.
    is_named: bool,
    /// Tokens that its prompt and its answer are expected to have.
    pub(crate) prompt_tokens: u64,
    pub(crate) output_tokens: u64,
    /// What the index says of its prompt.
    pub(crate) lookup: Option<Lookup>,
    /// Tokens of prefill that each member saves, by its seat.
    saved_tokens: Vec<f64>,
}

/// A prompt as placement sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prompt<'a> {
    pub(crate) key: &'a [u8],
    /// Estimated, unless the index has its tokens.
    pub(crate) n_tokens: u64,
    /// Those that its answer is expected to have.
    pub(crate) n_output_tokens: u64,
    /// Tokens of prefill that each member saves, by its seat.
    pub(crate) saved_tokens: &'a [f64],
    pub(crate) lookup: Option<&'a Lookup>,
}

impl RouteInput {
    /// Reads it from a request, and asks the index.
    pub(crate) async fn read(
        shared: &Shared,
        group: &ModelGroup,
        (route, peek): (Route, &Peek<'_>),
        headers: &HeaderMap,
        config: &RoutingConfig,
        output_tokens: u64,
    ) -> Self {
        let key = routing_key(peek, headers).into_owned();
        let lookup = Lookup::ask(shared, group, route, peek, config).await;
        let known = lookup.as_ref().filter(|_| is_prompt_key(&key)).and_then(Lookup::key);
        let saved_tokens = lookup.as_ref().map(|lookup| lookup.saved_tokens(group, &shared.under_way));
        Self {
            key: known.unwrap_or(key),
            is_named: peek.seq_id.is_some(),
            prompt_tokens: estimated_prompt_tokens(peek.n_prompt_bytes()),
            output_tokens,
            lookup,
            saved_tokens: saved_tokens.unwrap_or_default(),
        }
    }

    /// Of a request without a prompt: `key` spreads such requests over the members.
    pub(crate) fn without_prompt(key: Vec<u8>) -> Self {
        let (lookup, saved_tokens) = (None, Vec::new());
        Self { key, is_named: false, prompt_tokens: 0, output_tokens: 0, lookup, saved_tokens }
    }

    /// The request as it is placed.
    pub(crate) fn wanted(&self) -> Wanted<'_> {
        let tokens = self.prompt_tokens.saturating_add(self.output_tokens).max(1);
        let request = Request { key: &self.key, tokens, matched_tokens: &self.saved_tokens };
        Wanted { request, output_tokens: self.output_tokens, is_named: self.is_named }
    }

    /// Its prompt.
    pub(crate) fn prompt(&self) -> Prompt<'_> {
        Prompt {
            key: &self.key,
            n_tokens: self.prompt_tokens,
            n_output_tokens: self.output_tokens,
            saved_tokens: &self.saved_tokens,
            lookup: self.lookup.as_ref(),
        }
    }
}
