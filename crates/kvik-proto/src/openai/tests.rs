//! Requests and answers as real clients and servers write them.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z]{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 5, |inner| {
        let name = prop_oneof![
            Just("model"),
            Just("prompt"),
            Just("messages"),
            Just("role"),
            Just("content"),
            Just("type"),
            Just("text"),
            Just("n"),
            Just("stop"),
            Just("stream_options"),
            Just("tokens"),
            Just("x"),
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(name.prop_map(str::to_owned), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_json_is_a_request_or_an_error(value in any_json()) {
        let text = value.to_string();
        if let Ok(request) = serde_json::from_str::<CompletionRequest>(&text) {
            let again: CompletionRequest =
                serde_json::from_value(serde_json::to_value(&request).unwrap()).unwrap();
            prop_assert_eq!(again.prompt, request.prompt);
        }
        if let Ok(request) = serde_json::from_str::<ChatRequest>(&text) {
            let again: ChatRequest = serde_json::from_value(serde_json::to_value(&request).unwrap()).unwrap();
            prop_assert_eq!(again.messages, request.messages);
        }
        let _ = serde_json::from_str::<TokenizeRequest>(&text);
        let _ = serde_json::from_str::<DetokenizeRequest>(&text);
    }
}

#[test]
fn all_forms_of_a_prompt_are_read() {
    let read = |value: Value| serde_json::from_value::<Prompt>(value);
    assert_eq!(read(json!("a")).unwrap(), Prompt::Text("a".into()));
    assert_eq!(read(json!(["a", "b"])).unwrap(), Prompt::Texts(vec!["a".into(), "b".into()]));
    assert_eq!(read(json!([1, 2])).unwrap(), Prompt::Tokens(vec![1, 2]));
    assert_eq!(read(json!([[1], [2, 3]])).unwrap(), Prompt::TokenLists(vec![vec![1], vec![2, 3]]));
    let error = read(json!({"a": 1})).unwrap_err().to_string();
    assert!(error.contains("a string, a list of strings"), "{error}");
}

#[test]
fn a_request_with_nulls_and_unknown_fields_is_one_with_defaults() {
    let request: ChatRequest = serde_json::from_value(json!({
        "model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "temperature": null, "stop": null, "n": null, "reasoning_effort": "high", "store": false,
    }))
    .unwrap();
    assert_eq!(request.sampling(), crate::worker::Sampling::default());
    let request: CompletionRequest = serde_json::from_value(json!({
        "prompt": "a", "top_k": -1, "seed": -1, "stop": "x", "unknown": {"a": [1]},
    }))
    .unwrap();
    let sampling = request.sampling();
    assert_eq!(
        (sampling.top_k, sampling.seed, sampling.stop),
        (Some(0), Some(u64::MAX), Some(vec!["x".to_owned()]))
    );
}

#[test]
fn chat_logprobs_are_asked_for_with_a_number_of_alternatives() {
    let request = |value: Value| serde_json::from_value::<ChatRequest>(value).unwrap().sampling().logprobs;
    assert_eq!(request(json!({"messages": [], "logprobs": true})), Some(0));
    assert_eq!(request(json!({"messages": [], "logprobs": true, "top_logprobs": 3})), Some(3));
    assert_eq!(request(json!({"messages": [], "logprobs": false})), None);
}

#[test]
fn a_growing_choice_says_that_it_has_not_finished() {
    let chunk = serde_json::to_value(ChatChunkChoice::default()).unwrap();
    assert_eq!(chunk, json!({"index": 0, "delta": {}, "logprobs": null, "finish_reason": null}));
    let choice = serde_json::to_value(CompletionChoice::default()).unwrap();
    assert_eq!(choice, json!({"index": 0, "text": "", "logprobs": null, "finish_reason": null}));
}

#[test]
fn usage_adds_up() {
    let mut usage = Usage::default();
    usage.add(10, 4, 3);
    usage.add(0, 0, 5);
    assert_eq!(
        serde_json::to_value(usage).unwrap(),
        json!({"prompt_tokens": 10, "completion_tokens": 8, "total_tokens": 18,
               "prompt_tokens_details": {"cached_tokens": 4}})
    );
}

#[test]
fn flattened_fields_are_read_beside_the_others_and_written_there() {
    let body = json!({"messages": [], "temperature": 1, "max_tokens": 5, "max_completion_tokens": 4, "n": 2});
    let request: ChatRequest = serde_json::from_value(body).unwrap();
    assert_eq!((request.sampling_fields.temperature, request.sampling_fields.n), (Some(1.0), Some(2)));
    assert_eq!(request.sampling().max_tokens, Some(4));
    let written = serde_json::to_value(&request).unwrap();
    assert_eq!((&written["n"], &written["max_tokens"]), (&json!(2), &json!(5)));
}

#[test]
fn an_error_is_an_answer_with_its_status_and_time() {
    let body = ErrorBody::context_length("`token_ids` is too long", "token_ids");
    let response = body.response(http::StatusCode::BAD_REQUEST, None);
    assert_eq!(response.status(), http::StatusCode::BAD_REQUEST);
    assert_eq!(response.headers()["content-type"], "application/json");
    assert!(!response.headers().contains_key("retry-after"));
    let read: Value = serde_json::from_slice(response.body()).unwrap();
    let expected = json!({"message": "`token_ids` is too long", "type": "invalid_request_error",
                          "param": "token_ids", "code": "context_length_exceeded"});
    assert_eq!(read["error"], expected);
    let later = ErrorBody::server("later").response(http::StatusCode::SERVICE_UNAVAILABLE, Some(7));
    assert_eq!(later.headers()["retry-after"], "7");
}
