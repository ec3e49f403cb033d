//! The prompt of a request, as far as an index can look it up.

use kvik_indexer::{ChatOptions, Json, Prompt};
use serde::Deserialize;

use crate::request::peek::Peek;
use crate::route::Route;

/// What a `prompt` may be; of several the first counts.
#[derive(Deserialize)]
#[serde(untagged)]
enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

/// The prompt of a request; `None` where there is none that could be looked up, or where tokens and salt alone do not
/// decide its KV. What is wrong with it is the worker's affair.
pub(crate) fn prompt_of(route: Route, peek: &Peek<'_>) -> Option<Prompt> {
    // Engines refuse an empty salt.
    if !route.is_generation() || peek.is_unpredictable || peek.cache_salt.as_deref() == Some("") {
        return None;
    }
    if let Some(messages) = peek.messages {
        let messages: Vec<Json> = serde_json::from_str(messages).ok()?;
        if !messages.iter().all(is_text_only) {
            return None;
        }
        return Some(Prompt::Chat(messages, chat_options(peek)?));
    }
    Some(match serde_json::from_str(peek.prompt?).ok()? {
        PromptField::Text(text) => Prompt::Text(text),
        PromptField::Tokens(tokens) => Prompt::Tokens(tokens),
        PromptField::Texts(texts) => Prompt::Text(texts.into_iter().next()?),
        PromptField::TokenLists(lists) => Prompt::Tokens(lists.into_iter().next()?),
    })
}

/// Whether a message has no image, audio or other part that is not text.
fn is_text_only(message: &Json) -> bool {
    let Some(Json::List(parts)) = field(message, "content") else { return true };
    parts.iter().all(|part| match part {
        Json::Text(_) => true,
        part => matches!(field(part, "type"), Some(Json::Text(kind)) if kind == "text"),
    })
}

/// The last value of a field of an object.
fn field<'a>(value: &'a Json, name: &str) -> Option<&'a Json> {
    let Json::Object(fields) = value else { return None };
    fields.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value)
}

/// How the engine will render the conversation; `None` if it will refuse it.
fn chat_options(peek: &Peek<'_>) -> Option<ChatOptions> {
    let defaults = ChatOptions::default();
    let flag = |text: Option<&str>, default| text.map_or(Some(default), |text| text.parse().ok());
    let variables = match peek.chat_template_kwargs.map(serde_json::from_str).transpose().ok()? {
        None => Vec::new(),
        Some(Json::Object(variables)) => variables,
        Some(_) => return None,
    };
    Some(ChatOptions {
        add_generation_prompt: flag(peek.add_generation_prompt, defaults.add_generation_prompt)?,
        continue_final_message: flag(peek.continue_final_message, defaults.continue_final_message)?,
        tools: peek.tools.map(serde_json::from_str).transpose().ok()?,
        template_variables: variables,
        ..defaults
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(body: &str) -> Option<Prompt> {
        prompt_of(Route::Completions, &Peek::read(body.as_bytes()).unwrap())
    }

    fn options(body: &str) -> Option<ChatOptions> {
        match prompt(body) {
            Some(Prompt::Chat(_, options)) => Some(options),
            _ => None,
        }
    }

    #[test]
    fn every_form_of_a_prompt_is_read() {
        assert_eq!(prompt(r#"{"prompt":"a\n"}"#), Some(Prompt::Text("a\n".to_owned())));
        assert_eq!(prompt(r#"{"prompt":["a","b"]}"#), Some(Prompt::Text("a".to_owned())));
        assert_eq!(prompt(r#"{"prompt":[1,2]}"#), Some(Prompt::Tokens(vec![1, 2])));
        assert_eq!(prompt(r#"{"prompt":[[1],[2]]}"#), Some(Prompt::Tokens(vec![1])));
        assert_eq!(prompt(r#"{"token_ids":[7]}"#), Some(Prompt::Tokens(vec![7])));
        assert_eq!(options(r#"{"messages":[{"role":"user"}]}"#), Some(ChatOptions::default()));
        let body = r#"{"messages":[],"tools":[1],"add_generation_prompt":false,"continue_final_message":true,
            "chat_template_kwargs":{"enable_thinking":false}}"#;
        let expected = ChatOptions {
            add_generation_prompt: false,
            continue_final_message: true,
            tools: Some(Json::List(vec![Json::Integer(1)])),
            template_variables: vec![("enable_thinking".to_owned(), Json::Bool(false))],
            ..ChatOptions::default()
        };
        assert_eq!(options(body), Some(expected));
    }

    #[test]
    fn a_prompt_whose_kv_its_tokens_do_not_decide_is_not_looked_up() {
        for field in [
            r#""truncate_prompt_tokens":8"#,
            r#""prompt_logprobs":0"#,
            r#""echo":true"#,
            r#""lora_path":"a""#,
            r#""lora_request":{"name":"a"}"#,
            r#""add_special_tokens":false"#,
            r#""chat_template":"x""#,
            r#""mm_processor_kwargs":{"size":1}"#,
            r#""kv_transfer_params":{"do_remote_decode":true}"#,
            r#""cache_salt":"""#,
            r#""kvik":{"separator":"b","blend":"none"}"#,
        ] {
            assert_eq!(prompt(&format!(r#"{{"prompt":"a",{field}}}"#)), None, "{field}");
        }
        let part = |part: &str| {
            prompt(&format!(
                r#"{{"messages":[{{"role":"user","content":[{{"type":"text","text":"a"}},{part}]}}]}}"#
            ))
        };
        assert_eq!(part(r#"{"type":"image_url","image_url":{"url":"data:"}}"#), None);
        assert_eq!(part(r#"{"type":"input_audio","input_audio":{}}"#), None);
        assert!(part(r#"{"type":"text","text":"b"}"#).is_some());
    }

    #[test]
    fn fields_at_their_defaults_and_salts_do_not_hide_a_prompt() {
        for field in [
            r#""prompt_logprobs":null"#,
            r#""echo":false"#,
            r#""truncate_prompt_tokens":null"#,
            r#""documents":[]"#,
            r#""kvik":{}"#,
            r#""cache_salt":"tenant""#,
        ] {
            let body = format!(r#"{{"prompt":"a",{field}}}"#);
            assert_eq!(prompt(&body), Some(Prompt::Text("a".to_owned())), "{field}");
        }
    }

    #[test]
    fn what_is_no_prompt_is_left_to_the_worker() {
        for body in [
            "{}",
            r#"{"prompt":7}"#,
            r#"{"prompt":[-1]}"#,
            r#"{"messages":"x"}"#,
            r#"{"messages":[],"chat_template_kwargs":[]}"#,
        ] {
            assert_eq!(prompt(body), None, "{body}");
        }
        let peek = Peek::read(br#"{"prompt":"a"}"#).unwrap();
        assert_eq!(prompt_of(Route::Tokenize, &peek), None);
    }
}
