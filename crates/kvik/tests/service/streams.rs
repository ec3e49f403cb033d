//! Streams that are compared with those of an undisturbed run.

use serde_json::{Value, json};

use crate::cluster::Client;
use crate::http::{self, Answer};

/// Requests of all kinds, each long enough to be disturbed.
pub(crate) fn requests() -> Vec<(&'static str, Value)> {
    let story = "Once upon a time there was a little girl who had a red ball and a blue ball. ";
    let greedy = json!({
        "model": "kvik-tiny", "prompt": story.repeat(4), "max_tokens": 400, "temperature": 0, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true},
    });
    let several = json!({
        "model": "kvik-tiny", "prompt": [story, "The sun was warm and the"], "max_tokens": 300, "temperature": 0.9,
        "seed": 7, "n": 2, "logprobs": 2, "ignore_eos": true, "stream": true, "echo": false,
        "repetition_penalty": 1.2, "stream_options": {"include_usage": true},
    });
    let chat = json!({
        "model": "kvik-tiny", "messages": [{"role": "user", "content": "Tell me about the sun."}], "max_tokens": 400,
        "temperature": 1.1, "seed": 3, "ignore_eos": true, "stop": ["zebra zebra"], "stream": true,
        "return_token_ids": true, "stream_options": {"include_usage": true},
    });
    let generate =
        json!({"prompt": story, "max_tokens": 400, "temperature": 0.8, "seed": 11, "ignore_eos": true});
    vec![
        ("/v1/completions", greedy),
        ("/v1/completions", several),
        ("/v1/chat/completions", chat),
        ("/generate", generate),
    ]
}

/// Opens a stream that keeps its KV from all others, so that what is cached does not differ between runs.
pub(crate) fn open(
    gateway: &Client,
    (path, body): &(&str, Value),
    seq_id: Option<&str>,
    salt: &str,
) -> Answer {
    let mut body = body.clone();
    body["cache_salt"] = salt.into();
    if let Some(seq_id) = seq_id
        && body["prompt"].as_array().is_none()
    {
        body["seq_id"] = seq_id.into();
    }
    let answer = http::send(&gateway.address, "POST", path, Some(&body)).unwrap();
    assert_eq!(answer.status, 200);
    answer
}

/// The events as a client sees them, less the id and the time of the answer, which must be the same in all events.
pub(crate) fn normalized(events: Vec<String>) -> Vec<Value> {
    let mut head = None;
    let normalize = |event: String| {
        if event == "[DONE]" {
            return Value::from(event);
        }
        let mut event: Value = serde_json::from_str(&event).unwrap();
        if event.get("id").is_some() {
            let of_event = (event["id"].take(), event["created"].take());
            let of_answer = head.get_or_insert_with(|| of_event.clone());
            assert_eq!(*of_answer, of_event, "one answer has one head");
        }
        event
    };
    events.into_iter().map(normalize).collect()
}

/// By output, in order: outputs of one request run side by side, in no order that a client may rely on.
pub(crate) fn by_output(events: Vec<Value>) -> Vec<(Value, Value)> {
    let output = |event: &Value| match event.get("choice") {
        Some(choice) => choice.clone(),
        None => event.pointer("/choices/0/index").cloned().unwrap_or(json!(1000)),
    };
    let mut events: Vec<(Value, Value)> = events.into_iter().map(|event| (output(&event), event)).collect();
    events.sort_by_key(|(output, _)| output.as_u64());
    events
}

/// What the undisturbed run of each of `requests` gives.
pub(crate) fn undisturbed(
    gateway: &Client,
    requests: &[(&str, Value)],
    seq_id: Option<&str>,
) -> Vec<Vec<(Value, Value)>> {
    let whole = |(number, request): (usize, &(&str, Value))| {
        let mut stream = open(gateway, request, seq_id, &format!("undisturbed-{number}"));
        by_output(normalized(stream.events().unwrap()))
    };
    requests.iter().enumerate().map(whole).collect()
}
