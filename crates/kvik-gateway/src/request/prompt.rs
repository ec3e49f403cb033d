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

/// The prompt of a request; `None` where there is none that could be looked up. What is wrong with it is
/// the worker's affair.
pub(crate) fn prompt_of(route: Route, peek: &Peek<'_>) -> Option<Prompt> {
    if !route.is_generation() {
        return None;
    }
    if let Some(messages) = peek.messages {
        return Some(Prompt::Chat(serde_json::from_str(messages).ok()?, chat_options(peek)?));
    }
    Some(match serde_json::from_str(peek.prompt?).ok()? {
        PromptField::Text(text) => Prompt::Text(text),
        PromptField::Tokens(tokens) => Prompt::Tokens(tokens),
        PromptField::Texts(texts) => Prompt::Text(texts.into_iter().next()?),
        PromptField::TokenLists(lists) => Prompt::Tokens(lists.into_iter().next()?),
    })
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
