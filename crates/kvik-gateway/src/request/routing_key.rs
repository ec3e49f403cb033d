//! The routing key of a request, and how many tokens it is expected to take.
//!
//! The key of a request is the first of: its `seq_id`, the header `x-session-id`, its
//! `prompt_cache_key`, its `user`, and the beginning of its prompt. The beginning of a prompt is
//!
//! - of messages: everything up to the end of the first user's message, so that all turns of a
//!   conversation have one key and conversations with one system prompt have several;
//! - of a text or token list: its first bytes, rounded down to whole blocks of 256 bytes if there
//!   is at least one, so that prompts that share a long prefix have one key;
//!
//! each as it is written in JSON and cut off after 2048 bytes, and hashed with XXH3 to 64 bits, to
//! which the hash of the request's `cache_salt` is added.
//! Kinds of keys do not collide: the key's first byte says which kind it is; only a `seq_id` stands
//! for itself, because the coordinator answers for the same key.

use std::borrow::Cow;

use http::HeaderMap;
use xxhash_rust::xxh3::xxh3_64;

use crate::request::peek::Peek;
use crate::request::peek::scan::{next_structure, string_end};

/// Longest part of a prompt that makes its key, in bytes: beyond this, prompts differ in what is
/// asked, not in what they share.
const MAX_PREFIX_BYTES: usize = 2048;
/// Granularity of a prompt's key, in bytes: about four token blocks of sixteen.
const PREFIX_BLOCK_BYTES: usize = 256;
/// First byte of every key that is no `seq_id`: 0xff cannot occur in UTF-8, so no `seq_id` starts with it.
const KEY_MARK: u8 = 0xff;
/// Bytes of text that are about one token.
const BYTES_PER_TOKEN: u64 = 4;

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
    // Requests with another salt share no KV with this one.
    let salt = peek.cache_salt.as_deref().map_or(0, |salt| xxh3_64(salt.as_bytes()));
    tagged(b'p', &(xxh3_64(prefix) ^ salt).to_le_bytes())
}

/// Whether a request's key is only the beginning of its prompt, and not a choice of the client.
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
    use super::*;

    fn key(body: &str) -> Vec<u8> {
        routing_key(&Peek::read(body.as_bytes()).unwrap(), &HeaderMap::new()).into_owned()
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
        let salted = |salt: &str| key(&format!(r#"{{"prompt":"a","cache_salt":"{salt}"}}"#));
        assert_eq!(salted("x"), salted("x"));
        assert!(salted("x") != salted("y") && salted("x") != prompt("a"));
    }
}
