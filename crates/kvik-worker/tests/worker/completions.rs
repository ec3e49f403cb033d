//! `/v1/completions`.

use kvik_model::SamplingParams;
use serde_json::{Value, json};

use crate::support::{PROMPT, engine_alone, start, tokens_of};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn a_greedy_completion_is_that_of_the_engine_alone() {
    let worker = start().await;
    let (tokens, text) = engine_alone(tokens_of(PROMPT), SamplingParams::greedy(24));
    let body = json!({
        "model": "kvik-tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "return_token_ids": true,
        "some_field_of_tomorrow": {"a": 1},
    });
    let answer = worker.client.ask(PATH, &body).await;
    assert_eq!(answer["choices"][0]["text"], Value::from(text.clone()));
    assert_eq!(answer["choices"][0]["token_ids"], json!(tokens));
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["model"], "kvik-tiny");
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    let n_prompt = tokens_of(PROMPT).len();
    assert_eq!(answer["usage"]["prompt_tokens"], n_prompt);
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    assert_eq!(answer["usage"]["total_tokens"], n_prompt + 24);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);

    let by_tokens = json!({"prompt": tokens_of(PROMPT), "max_tokens": 24, "temperature": 0});
    let again = worker.client.ask(PATH, &by_tokens).await;
    assert_eq!(again["choices"][0]["text"], Value::from(text));
    assert_ne!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_ne!(again["id"], answer["id"]);
    worker.end().await;
}

#[tokio::test]
async fn the_pieces_of_a_stream_are_the_text() {
    let worker = start().await;
    let mut body = json!({"prompt": PROMPT, "max_tokens": 40, "seed": 7, "temperature": 0.8});
    let whole = worker.client.ask(PATH, &body).await;
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let mut events = worker.client.events(PATH, &body).await;
    assert_eq!(events.pop().unwrap(), "[DONE]");
    let chunks: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let (usage, chunks) = chunks.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    let text: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(whole["choices"][0]["text"], Value::from(text));
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]);
    assert!(before.iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()));
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["usage"].is_null()));
    worker.end().await;
}

#[tokio::test]
async fn many_prompts_and_choices_come_in_order_and_a_seed_repeats_them() {
    let worker = start().await;
    let body = json!({"prompt": ["The cat", "The dog"], "n": 3, "seed": 5, "max_tokens": 12});
    let answer = worker.client.ask(PATH, &body).await;
    let texts = |answer: &Value| -> Vec<String> {
        let choices = answer["choices"].as_array().unwrap();
        assert!(choices.iter().enumerate().all(|(idx, choice)| choice["index"] == idx));
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
    };
    let first = texts(&answer);
    assert_eq!(first.len(), 6);
    assert_ne!(first[0], first[1]);
    assert_eq!(texts(&worker.client.ask(PATH, &body).await), first);
    let one = json!({"prompt": "The dog", "n": 3, "seed": 5, "max_tokens": 12});
    assert_eq!(texts(&worker.client.ask(PATH, &one).await), first[3..]);
    let prompt_tokens = tokens_of("The cat").len() + tokens_of("The dog").len();
    assert_eq!(answer["usage"]["prompt_tokens"], prompt_tokens);

    let mut streamed = vec![String::new(); 6];
    let mut body = body.clone();
    body["stream"] = true.into();
    for event in worker.client.events(PATH, &body).await {
        let Ok(chunk) = serde_json::from_str::<Value>(&event) else { continue };
        let choice = &chunk["choices"][0];
        let idx = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        streamed[idx].push_str(choice["text"].as_str().unwrap());
    }
    assert_eq!(streamed, first);
    worker.end().await;
}

#[tokio::test]
async fn requests_without_a_seed_differ() {
    let worker = start().await;
    let body = json!({"prompt": PROMPT, "max_tokens": 30});
    let first = worker.client.ask(PATH, &body).await;
    let second = worker.client.ask(PATH, &body).await;
    assert_ne!(first["choices"][0]["text"], second["choices"][0]["text"]);
    worker.end().await;
}

#[tokio::test]
async fn stop_strings_and_stop_tokens_end_the_output() {
    let worker = start().await;
    let (tokens, text) = engine_alone(tokens_of(PROMPT), SamplingParams::greedy(40));
    let stop = text.split_whitespace().nth(4).unwrap();
    let body = json!({"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": stop});
    let answer = worker.client.ask(PATH, &body).await;
    let cut = &text[..text.find(stop).unwrap()];
    assert_eq!(answer["choices"][0]["text"], cut);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let body = json!({"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop_token_ids": [tokens[3]],
                      "stop": ["\u{1}", "never"], "return_token_ids": true});
    let answer = worker.client.ask(PATH, &body).await;
    let n_tokens = tokens.iter().position(|token| *token == tokens[3]).unwrap() + 1;
    assert_eq!(answer["choices"][0]["token_ids"], json!(tokens[..n_tokens]));
    worker.end().await;
}

#[tokio::test]
async fn logprobs_belong_to_the_tokens() {
    let worker = start().await;
    let mut body = json!({"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 3});
    let whole = worker.client.ask(PATH, &body).await;
    let logprobs = &whole["choices"][0]["logprobs"];
    for field in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[field].as_array().unwrap().len(), 6, "{field}");
    }
    for idx in 0..6 {
        let token = logprobs["tokens"][idx].as_str().unwrap();
        let chosen = logprobs["token_logprobs"][idx].as_f64().unwrap();
        let top = logprobs["top_logprobs"][idx].as_object().unwrap();
        assert!(chosen <= 0.0 && top.len() == 3);
        // Greedy: the chosen one is the most likely.
        assert_eq!(top[token].as_f64().unwrap().total_cmp(&chosen), std::cmp::Ordering::Equal);
    }
    body["stream"] = true.into();
    let events = worker.client.events(PATH, &body).await;
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|event| serde_json::from_str::<Value>(event).ok())
        .filter(|chunk| !chunk["choices"][0]["logprobs"].is_null())
        .map(|chunk| chunk["choices"][0]["logprobs"]["text_offset"][0].clone())
        .collect();
    assert_eq!(&Value::from(streamed), &logprobs["text_offset"]);
    worker.end().await;
}

#[tokio::test]
async fn an_echo_stands_before_the_output() {
    let worker = start().await;
    let plain = json!({"prompt": ["The cat", "A"], "max_tokens": 5, "temperature": 0});
    let mut echoed = plain.clone();
    echoed["echo"] = true.into();
    let plain = worker.client.ask(PATH, &plain).await;
    let echoed = worker.client.ask(PATH, &echoed).await;
    for (idx, prompt) in ["The cat", "A"].into_iter().enumerate() {
        let text = plain["choices"][idx]["text"].as_str().unwrap();
        assert_eq!(echoed["choices"][idx]["text"], format!("{prompt}{text}"));
    }
    worker.end().await;
}

#[tokio::test]
async fn tokens_go_there_and_back() {
    let worker = start().await;
    let answer = worker.client.ask("/tokenize", &json!({"prompt": PROMPT, "model": "kvik-tiny"})).await;
    assert_eq!(answer["tokens"], json!(tokens_of(PROMPT)));
    assert_eq!(answer["count"], tokens_of(PROMPT).len());
    assert_eq!(answer["max_model_len"], 4096);
    let plain = worker.client.ask("/tokenize", &json!({"prompt": PROMPT, "add_special_tokens": false})).await;
    let text = worker.client.ask("/detokenize", &json!({"tokens": plain["tokens"]})).await;
    assert_eq!(text["prompt"], PROMPT);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    assert!(0 < worker.client.ask("/tokenize", &chat).await["count"].as_u64().unwrap());
    let models = worker.client.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "kvik-tiny");
    assert_eq!(worker.client.get("/v1/models/kvik-tiny").await.json()["object"], "model");
    worker.end().await;
}
