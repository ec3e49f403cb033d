//! `/v1/chat/completions`.

use serde_json::{Value, json};

use crate::support::start;

const PATH: &str = "/v1/chat/completions";

fn conversation() -> Value {
    json!({
        "model": "kvik-tiny",
        "messages": [
            {"role": "system", "content": "You tell stories."},
            {"role": "user", "content": [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "one."}]},
        ],
        "temperature": 0, "max_completion_tokens": 20,
    })
}

#[tokio::test]
async fn a_conversation_is_answered_as_its_rendered_prompt() {
    let worker = start().await;
    let body = conversation();
    let answer = worker.client.ask(PATH, &body).await;
    assert_eq!(answer["object"], "chat.completion");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
    let tokens =
        worker.client.ask("/tokenize", &json!({"messages": body["messages"]})).await["tokens"].clone();
    let completion = json!({"prompt": tokens, "max_tokens": 20, "temperature": 0});
    let completion = worker.client.ask("/v1/completions", &completion).await;
    assert_eq!(answer["choices"][0]["message"]["content"], completion["choices"][0]["text"]);
    assert_eq!(answer["usage"]["prompt_tokens"], completion["usage"]["prompt_tokens"]);
    worker.end().await;
}

#[tokio::test]
async fn a_stream_begins_with_the_role_and_its_pieces_are_the_text() {
    let worker = start().await;
    let mut body = conversation();
    body["n"] = 2.into();
    body["seed"] = 3.into();
    body["temperature"] = 1.into();
    let whole = worker.client.ask(PATH, &body).await;
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let mut events = worker.client.events(PATH, &body).await;
    assert_eq!(events.pop().unwrap(), "[DONE]");
    let mut texts = [String::new(), String::new()];
    let mut n_roles = [0, 0];
    for event in &events {
        let chunk: Value = serde_json::from_str(event).unwrap();
        assert_eq!(chunk["object"], "chat.completion.chunk");
        let Some(choice) = chunk["choices"].get(0) else {
            // The prompt's tokens may have been found the second time.
            assert_eq!(chunk["usage"]["total_tokens"], whole["usage"]["total_tokens"]);
            continue;
        };
        let idx = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        if choice["delta"]["role"] == "assistant" {
            assert!(texts[idx].is_empty());
            n_roles[idx] += 1;
        }
        texts[idx].push_str(choice["delta"]["content"].as_str().unwrap_or_default());
    }
    assert_eq!(n_roles, [1, 1]);
    for (idx, text) in texts.iter().enumerate() {
        assert_eq!(whole["choices"][idx]["message"]["content"], text.as_str());
    }
    worker.end().await;
}

#[tokio::test]
async fn logprobs_carry_their_alternatives_and_bytes() {
    let worker = start().await;
    let mut body = conversation();
    body["logprobs"] = true.into();
    body["top_logprobs"] = 2.into();
    let answer = worker.client.ask(PATH, &body).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(
        content.len(),
        usize::try_from(answer["usage"]["completion_tokens"].as_u64().unwrap()).unwrap()
    );
    for entry in content {
        assert_eq!(entry["bytes"], json!(entry["token"].as_str().unwrap().as_bytes()));
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(entry["top_logprobs"][0]["logprob"], entry["logprob"]);
    }
    worker.end().await;
}

#[tokio::test]
async fn without_a_limit_an_answer_ends_by_itself_or_with_the_context() {
    let mut config = crate::support::config();
    config.kv_blocks = 8;
    let worker = crate::support::start_with(config).await;
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": true});
    let answer = worker.client.ask(PATH, &body).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["total_tokens"], 8 * 16);
    worker.end().await;
}
