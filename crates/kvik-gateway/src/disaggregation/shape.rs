//! What a body says that decides in which parts its request can be done.

use serde::de::IgnoredAny;

use crate::request::peek::changes_kv;
use crate::request::peek::scan::scan_object;
use crate::route::Route;

/// Fields that say to engines where KV is; a client that sets one reaches into engines.
const ENGINE_FIELDS: [&str; 6] = [
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
    "bootstrap_pair_key",
];

/// The shape of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shape {
    /// Prompts in it.
    pub(super) n_prompts: usize,
    /// Outputs of each prompt.
    pub(super) n_outputs: u64,
    pub(super) is_chat: bool,
    pub(super) is_stream: bool,
    /// A field of engines that the client has set itself.
    pub(super) engine_field: Option<&'static str>,
    /// Why its prompt cannot be computed on one engine and used on another, if so.
    pub(super) obstacle: Option<&'static str>,
}

impl Shape {
    /// Reads the shape of a body; `None` if there is none that could be read, or the route does not generate.
    pub(super) fn read(route: Route, body: &[u8]) -> Option<Self> {
        let text = simdutf8::basic::from_utf8(body).ok()?;
        let is_chat = match route {
            Route::Completions => false,
            Route::Chat => true,
            Route::Generate
            | Route::Tokenize
            | Route::Detokenize
            | Route::Init
            | Route::Step
            | Route::Finish
            | Route::Other => return None,
        };
        let mut shape = Self {
            n_prompts: 0,
            n_outputs: 1,
            is_chat,
            is_stream: false,
            engine_field: None,
            obstacle: None,
        };
        let mut limits = [None; 2];
        scan_object(text, |name, value| {
            if let Some(field) = ENGINE_FIELDS.into_iter().find(|field| *field == name) {
                if value != "null" {
                    shape.engine_field = Some(field);
                }
                return;
            }
            match name {
                "prompt" if !is_chat => shape.n_prompts = n_prompts(value),
                "messages" if is_chat => shape.n_prompts = usize::from(value.starts_with('[')),
                "n" | "best_of" if value != "null" => match value.parse::<u64>() {
                    Ok(number) => shape.n_outputs = shape.n_outputs.max(number),
                    Err(_) => shape.obstacle = Some("n"),
                },
                "max_tokens" => limits[0] = value.parse().ok(),
                "max_completion_tokens" => limits[1] = value.parse().ok(),
                "stream" => shape.is_stream = value == "true",
                "use_beam_search" if value != "false" && value != "null" => {
                    shape.obstacle = Some("use_beam_search");
                }
                // A prompt of which only a part counts, or all of which is computed in any case.
                name if changes_kv(name, value) => shape.obstacle = Some("prompt options"),
                _ => {}
            }
        })
        .ok()?;
        // The newer name wins, as in the API that has both.
        let max_tokens: Option<u64> = limits[1].or(limits[0]);
        if max_tokens.is_some_and(|max_tokens| max_tokens <= 1) {
            shape.obstacle = Some("max_tokens");
        }
        // Engines hand over the KV of one prompt and one output.
        if 1 < shape.n_outputs {
            shape.obstacle = Some("n");
        }
        if shape.n_prompts != 1 {
            shape.obstacle = Some("prompt");
        }
        Some(shape)
    }
}

/// Prompts of a `prompt`: a text and a list of tokens are one.
fn n_prompts(value: &str) -> usize {
    match value.as_bytes().first() {
        Some(b'"') => 1,
        Some(b'[') => {
            let inside = value[1..].trim_ascii_start();
            if inside.starts_with(|first: char| first.is_ascii_digit()) {
                return 1;
            }
            serde_json::from_str::<Vec<IgnoredAny>>(value).map_or(0, |prompts| prompts.len())
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(route: Route, body: &str) -> Shape {
        Shape::read(route, body.as_bytes()).unwrap()
    }

    #[test]
    fn a_request_for_one_output_of_one_prompt_has_no_obstacle() {
        for body in [
            r#"{"prompt":"a"}"#,
            r#"{"prompt":[ 1,2]}"#,
            r#"{"prompt":["a"],"n":1,"echo":false,"best_of":null}"#,
            r#"{"prompt":[[1,2]],"max_tokens":2}"#,
        ] {
            assert_eq!(shape(Route::Completions, body).obstacle, None, "{body}");
        }
        let chat = shape(Route::Chat, r#"{"messages":[{"role":"user","content":"a"}],"stream":true}"#);
        assert_eq!((chat.obstacle, chat.is_stream, chat.n_prompts), (None, true, 1));
    }

    #[test]
    fn what_cannot_be_parted_is_named() {
        for (body, obstacle) in [
            (r#"{"prompt":["a","b"]}"#, "prompt"),
            (r#"{"prompt":[[1],[2]]}"#, "prompt"),
            (r#"{"prompt":7}"#, "prompt"),
            ("{}", "prompt"),
            (r#"{"prompt":"a","n":2}"#, "n"),
            (r#"{"prompt":"a","best_of":3}"#, "n"),
            (r#"{"prompt":"a","n":"x"}"#, "n"),
            (r#"{"prompt":"a","use_beam_search":true}"#, "use_beam_search"),
            (r#"{"prompt":"a","echo":true}"#, "prompt options"),
            (r#"{"prompt":"a","prompt_logprobs":0}"#, "prompt options"),
            (r#"{"prompt":"a","truncate_prompt_tokens":-1}"#, "prompt options"),
            (r#"{"prompt":"a","max_tokens":1}"#, "max_tokens"),
            (r#"{"prompt":"a","max_tokens":9,"max_completion_tokens":0}"#, "max_tokens"),
        ] {
            assert_eq!(shape(Route::Completions, body).obstacle, Some(obstacle), "{body}");
        }
        assert_eq!(shape(Route::Chat, r#"{"prompt":"a"}"#).obstacle, Some("prompt"));
        assert_eq!(Shape::read(Route::Tokenize, b"{}"), None);
        assert_eq!(Shape::read(Route::Chat, b"["), None);
    }

    #[test]
    fn fields_of_engines_are_seen_however_they_are_written() {
        for body in [
            r#"{"prompt":"a","kv_transfer_params":{}}"#,
            r#"{"prompt":"a","kv\u005ftransfer_params":{"remote_host":"x"}}"#,
            r#"{"prompt":"a","kv_transfer_params":{"a":1},"kv_transfer_params":null}"#,
        ] {
            assert_eq!(shape(Route::Completions, body).engine_field, Some("kv_transfer_params"), "{body}");
        }
        let body = r#"{"prompt":"a","bootstrap_room":1,"kv_transfer_params":null}"#;
        assert_eq!(shape(Route::Completions, body).engine_field, Some("bootstrap_room"));
        assert_eq!(
            shape(Route::Completions, r#"{"prompt":"a","kv_transfer_params":null}"#).engine_field,
            None
        );
    }
}
