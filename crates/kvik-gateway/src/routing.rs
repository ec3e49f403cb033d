//! Which worker takes a request.
//!
//! The key of a request is the first of: its `seq_id`, the header `x-session-id`, its
//! `prompt_cache_key`, its `user`, and the beginning of its prompt. The beginning of a prompt is
//!
//! - of messages: everything up to the end of the first user's message, so that all turns of a
//!   conversation have one key and conversations with one system prompt have several;
//! - of a text or token list: its first bytes, rounded down to whole blocks of 256 bytes if there
//!   is at least one, so that prompts that share a long prefix have one key;
//!
//! each as it is written in JSON and cut off after 2048 bytes, and hashed with XXH3 to 64 bits.
//! Kinds of keys do not collide: the key's first byte says which kind it is; only a `seq_id` stands
//! for itself, because the coordinator answers for the same key.
//!
//! Where the index knows a beginning of the prompt, the key is the prompt up to the first block that nobody has.
//!
//! The key's place on the ring of the model's workers and the bound on their loads decide; see
//! [`kvik_index::ring`]. The choice and the load that follows from it are one step under one lock,
//! so that no bound is passed by two requests that choose at once.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use kvik_index::placement::{Request, choose};
use kvik_index::ring::{Loads, Reason, Ring};
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use crate::backend::{Backend, LoadGuard};
use crate::peek::Peek;
use crate::peek::scan::{next_structure, string_end};

/// Longest part of a prompt that makes its key, in bytes: beyond this, prompts differ in what is
/// asked, not in what they share.
const MAX_PREFIX_BYTES: usize = 2048;
/// Granularity of a prompt's key, in bytes: about four token blocks of sixteen.
const PREFIX_BLOCK_BYTES: usize = 256;
/// Members whose loads fit on the stack.
const MANY: usize = 64;
/// What keys that are no `seq_id` begin with: a byte that no JSON string can be told to start with in UTF-8.
const KEY_MARK: u8 = 0xff;
/// Bytes of text that are about one token.
const BYTES_PER_TOKEN: u64 = 4;

/// All models and who serves them; immutable, replaced as a whole.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    /// By model.
    pub(crate) groups: Vec<Arc<ModelGroup>>,
}

/// The backends of one model.
#[derive(Debug)]
pub(crate) struct ModelGroup {
    pub(crate) model: String,
    pub(crate) ring: Ring,
    /// Each by its place in [`Ring::members`].
    pub(crate) seats: Vec<Seat>,
    /// Each by its place in [`Ring::members`].
    pub(crate) weights: Vec<f64>,
    pub(crate) load_factor: f64,
}

/// A backend's place in a group.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    pub(crate) backend: Arc<Backend>,
    /// False while it drains.
    pub(crate) takes_requests: bool,
}

/// Makes a choice and its load one step.
#[derive(Debug, Default)]
pub(crate) struct Placement {
    lock: Mutex<()>,
}

/// A chosen backend with the request's load on it.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) load: LoadGuard,
    pub(crate) reason: Reason,
}

// === impl Fleet ===

impl Fleet {
    /// The group of `model`.
    pub(crate) fn group(&self, model: &str) -> Option<&Arc<ModelGroup>> {
        let place = self.groups.binary_search_by(|group| group.model.as_str().cmp(model)).ok()?;
        Some(&self.groups[place])
    }

    /// The only model there is, if there is only one.
    pub(crate) fn only_group(&self) -> Option<&Arc<ModelGroup>> {
        match self.groups.as_slice() {
            [group] => Some(group),
            _ => None,
        }
    }

    /// Whether some request can be served.
    pub(crate) fn is_usable(&self) -> bool {
        self.groups.iter().any(|group| group.seats.iter().any(Seat::is_usable))
    }
}

impl ModelGroup {
    /// Time until a backend may be usable again, if none is now.
    pub(crate) fn time_to_probe(&self) -> Duration {
        let seats = self.seats.iter().filter(|seat| seat.takes_requests);
        seats.map(|seat| seat.backend.time_to_probe()).min().unwrap_or(Duration::from_secs(1))
    }
}

impl Seat {
    pub(crate) fn is_usable(&self) -> bool {
        self.takes_requests && self.backend.is_usable()
    }
}

// === impl Placement ===

impl Placement {
    /// Places a request, under a bound of its own if somebody has a part of its prompt, on a usable backend of `group`
    /// other than the `excluded` ones; `None` if there is none. `output_tokens` are those of its tokens that its answer
    /// is expected to have.
    pub(crate) fn place(
        &self,
        group: &ModelGroup,
        request: Request<'_>,
        output_tokens: u64,
        kv_load_factor: f64,
        excluded: &[Arc<Backend>],
    ) -> Option<Placed> {
        let mut on_stack = [0; MANY];
        let mut on_heap = Vec::new();
        let tokens = if group.seats.len() <= MANY {
            &mut on_stack[..group.seats.len()]
        } else {
            on_heap.resize(group.seats.len(), 0);
            on_heap.as_mut_slice()
        };
        let is_usable = |member: usize| {
            group.seats.get(member).is_some_and(|seat| {
                seat.is_usable() && !excluded.iter().any(|other| Arc::ptr_eq(other, &seat.backend))
            })
        };
        let _one_at_a_time = self.lock.lock();
        for (tokens, seat) in tokens.iter_mut().zip(&group.seats) {
            *tokens = seat.backend.outstanding_tokens();
        }
        let loads = Loads { tokens, weights: &group.weights };
        let is_known = request.matched_tokens.iter().any(|n_tokens| *n_tokens > 0.0);
        let load_factor = if is_known { kv_load_factor } else { group.load_factor };
        let choice = choose(&group.ring, request, loads, load_factor, is_usable)?;
        let load = group.seats[choice.member].backend.load(request.left(choice.member), output_tokens);
        Some(Placed { load, reason: choice.reason })
    }
}

/// The key of a request.
pub(crate) fn routing_key<'a>(peek: &'a Peek<'_>, headers: &'a HeaderMap) -> Cow<'a, [u8]> {
    if let Some(seq_id) = &peek.seq_id {
        return Cow::Borrowed(seq_id.as_bytes());
    }
    if let Some(session) = headers.get("x-session-id") {
        return tagged(b's', session.as_bytes());
    }
    if let Some(key) = &peek.prompt_cache_key {
        return tagged(b'c', key.as_bytes());
    }
    if let Some(user) = &peek.user {
        return tagged(b'u', user.as_bytes());
    }
    let prefix = match (peek.messages, peek.prompt) {
        (Some(messages), _) => messages_prefix(messages.as_bytes()),
        (None, Some(prompt)) => prompt_prefix(prompt.as_bytes()),
        (None, None) => &[],
    };
    tagged(b'p', &xxh3_64(prefix).to_le_bytes())
}

/// Whether a request's key is only the beginning of its prompt, and no wish of the client.
pub(crate) fn is_prompt_key(key: &[u8]) -> bool {
    key.starts_with(&[KEY_MARK, b'p'])
}

/// Tokens that a prompt is expected to have.
pub(crate) fn estimated_prompt_tokens(n_prompt_bytes: usize) -> u64 {
    n_prompt_bytes as u64 / BYTES_PER_TOKEN
}

/// Tokens that an answer is expected to have.
pub(crate) fn estimated_output_tokens(max_tokens: Option<u64>, default_max_tokens: u64) -> u64 {
    // A limit that is far beyond any context says nothing about the length of the answer.
    max_tokens.map_or(default_max_tokens, |max_tokens| max_tokens.min(1 << 20))
}

pub(crate) fn tagged(tag: u8, key: &[u8]) -> Cow<'static, [u8]> {
    let mut tagged = Vec::with_capacity(key.len() + 2);
    tagged.push(KEY_MARK);
    tagged.push(tag);
    tagged.extend_from_slice(key);
    Cow::Owned(tagged)
}

fn prompt_prefix(prompt: &[u8]) -> &[u8] {
    let n_blocks = prompt.len().min(MAX_PREFIX_BYTES) / PREFIX_BLOCK_BYTES;
    if n_blocks == 0 { prompt } else { &prompt[..n_blocks * PREFIX_BLOCK_BYTES] }
}

/// The part of a JSON list of messages up to the end of the first one whose role is `user`.
fn messages_prefix(messages: &[u8]) -> &[u8] {
    let window = &messages[..messages.len().min(MAX_PREFIX_BYTES)];
    let (mut depth, mut start, mut place) = (0_u32, 0, 0);
    while let Some(structure) = next_structure(window, place) {
        place = structure + 1;
        match window[structure] {
            b'"' => match string_end(window, place) {
                Some(end) => place = end,
                None => return window,
            },
            b'[' | b'{' => {
                if depth == 1 {
                    start = structure;
                }
                depth += 1;
            }
            _ => {
                depth = depth.saturating_sub(1);
                if depth == 1 && is_from_user(&window[start..=structure]) {
                    return &window[..=structure];
                }
            }
        }
    }
    window
}

fn is_from_user(message: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Role<'a> {
        #[serde(borrow)]
        role: Cow<'a, str>,
    }
    serde_json::from_slice::<Role<'_>>(message).is_ok_and(|message| message.role == "user")
}

#[cfg(test)]
mod tests {
    use kvik_index::ring::RingHash;

    use super::*;
    use crate::backend::BackendKind;

    fn key(body: &str) -> Vec<u8> {
        routing_key(&Peek::read(body.as_bytes()).unwrap(), &HeaderMap::new()).into_owned()
    }

    fn request(tokens: u64) -> Request<'static> {
        Request { key: b"k", tokens, matched_tokens: &[] }
    }

    fn group(n_backends: usize) -> ModelGroup {
        let ids: Vec<(String, f64)> = (0..n_backends).map(|number| (format!("w{number:02}"), 1.0)).collect();
        let ring = Ring::build(RingHash::Xxh3, 160, &ids).unwrap();
        let seat = |(id, _): &(String, f64)| Seat {
            backend: Arc::new(Backend::new(id.clone(), BackendKind::Worker, 1, "http://127.0.0.1:1")),
            takes_requests: true,
        };
        ModelGroup {
            model: "m".to_owned(),
            seats: ids.iter().map(seat).collect(),
            weights: vec![1.0; n_backends],
            ring,
            load_factor: 0.25,
        }
    }

    #[test]
    fn the_first_of_the_fields_is_the_key() {
        let all = r#"{"seq_id":"q","prompt_cache_key":"c","user":"u","prompt":"p"}"#;
        assert_eq!(key(all), b"q");
        assert_eq!(key(r#"{"prompt_cache_key":"c","user":"u","prompt":"p"}"#), b"\xffcc");
        assert_eq!(key(r#"{"user":"u","prompt":"p"}"#), b"\xffuu");
        assert_ne!(key(r#"{"user":"c"}"#), key(r#"{"prompt_cache_key":"c"}"#));
        let session = HeaderMap::from_iter([("x-session-id".parse().unwrap(), "s".parse().unwrap())]);
        let peek = Peek::read(br#"{"prompt_cache_key":"c"}"#).unwrap();
        assert_eq!(&*routing_key(&peek, &session), b"\xffss");
    }

    #[test]
    fn all_turns_of_a_conversation_have_one_key_and_other_conversations_another() {
        let first =
            r#"{"messages":[{"role":"system","content":"be [brief] \"}"},{"role":"user","content":"hi"}]}"#;
        let second = r#"{"messages":[{"role":"system","content":"be [brief] \"}"},{"role":"user","content":"hi"},{"role":"assistant","content":"yes"},{"role":"user","content":"more"}]}"#;
        let other =
            r#"{"messages":[{"role":"system","content":"be [brief] \"}"},{"role":"user","content":"ho"}]}"#;
        assert_eq!(key(first), key(second));
        assert_ne!(key(first), key(other));
    }

    #[test]
    fn only_the_beginning_of_a_prompt_is_looked_at() {
        let message = |content: &str| format!(r#"[{{"role":"user","content":"{content}"}}]"#);
        let (short, long) = (message("hi"), message(&"x".repeat(MAX_PREFIX_BYTES)));
        assert_eq!(messages_prefix(short.as_bytes()), &short.as_bytes()[..short.len() - 1]);
        assert_eq!(messages_prefix(long.as_bytes()), &long.as_bytes()[..MAX_PREFIX_BYTES]);
        for broken in ["", "[", "]]]", "[{\"role", "{}}}{", "[\"user\"]"] {
            assert_eq!(messages_prefix(broken.as_bytes()), broken.as_bytes());
        }
    }

    #[test]
    fn prompts_that_share_a_long_prefix_have_one_key() {
        let prefix = "x".repeat(3000);
        let prompt = |text: &str| key(&format!(r#"{{"prompt":"{text}"}}"#));
        assert_eq!(prompt(&format!("{prefix} a")), prompt(&format!("{prefix} b")));
        assert_ne!(prompt("a"), prompt("b"));
    }

    #[test]
    fn equal_keys_go_to_one_worker_and_its_bound_sends_the_rest_on() {
        let (group, placement) = (group(4), Placement::default());
        let mut held = vec![placement.place(&group, request(100), 10, 1.0, &[]).unwrap()];
        assert_eq!(held[0].reason, Reason::Owner);
        let owner = Arc::clone(&held[0].load.backend);
        for _ in 0..40 {
            held.push(placement.place(&group, request(100), 10, 1.0, &[]).unwrap());
            let total: u64 = group.seats.iter().map(|seat| seat.backend.outstanding_tokens()).sum();
            for seat in &group.seats {
                // A request does not split: where none has room the least loaded one takes it.
                let bound = (1.25 * total as f64 / 4.0).ceil() as u64 + 100;
                assert!(seat.backend.outstanding_tokens() <= bound);
            }
        }
        assert!(held.iter().any(|placed| placed.reason == Reason::Bound));
        drop(held);
        assert!(group.seats.iter().all(|seat| seat.backend.outstanding_tokens() == 0));
        let excluded = [owner];
        let elsewhere = placement.place(&group, request(100), 10, 1.0, &excluded).unwrap();
        assert!(!Arc::ptr_eq(&elsewhere.load.backend, &excluded[0]));
    }

    #[test]
    fn more_backends_than_fit_on_the_stack_work_too() {
        let (group, placement) = (group(MANY + 9), Placement::default());
        assert!(placement.place(&group, request(1), 1, 1.0, &[]).is_some());
    }
}
