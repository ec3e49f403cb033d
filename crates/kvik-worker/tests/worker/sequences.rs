//! `/inference/*`.

use http::StatusCode;
use kvik_model::SamplingParams;
use kvik_proto::worker::{GenerateEvent, InitResponse, StepResponse};
use serde_json::{Value, json};

use crate::support::{PROMPT, TestClient, engine_alone, start, tokens_of};

fn greedy(max_tokens: u32) -> Value {
    json!({"temperature": 0.0, "max_tokens": max_tokens})
}

async fn init(client: &TestClient, seq_id: &str, prompt: &[u32], max_tokens: u32) -> InitResponse {
    let body = json!({"seq_id": seq_id, "token_ids": prompt, "sampling": greedy(max_tokens)});
    serde_json::from_value(client.ask("/inference/init", &body).await).unwrap()
}

async fn step(client: &TestClient, body: &Value) -> StepResponse {
    serde_json::from_value(client.ask("/inference/step", body).await).unwrap()
}

#[tokio::test]
async fn steps_give_what_a_stream_gives() {
    let worker = start().await;
    let client = &worker.client;
    let (tokens, text) = engine_alone(tokens_of(PROMPT), SamplingParams::greedy(20));
    let started = init(client, "a", &tokens_of(PROMPT), 20).await;
    assert_eq!(
        (started.status.as_str(), started.prompt_tokens, started.cached_tokens),
        ("ready", tokens_of(PROMPT).len(), 0)
    );
    assert_eq!(started.tokens_so_far, tokens[..1]);
    let (mut stepped, mut stepped_text) = (started.tokens_so_far, started.text);
    let mut is_finished = started.finished;
    while !is_finished {
        let answer = step(client, &json!({"seq_id": "a", "n": 3, "step_index": stepped.len()})).await;
        assert_eq!(answer.step_index, stepped.len() as u64);
        stepped.extend(&answer.tokens);
        stepped_text.push_str(&answer.text);
        is_finished = answer.finished;
        assert_eq!(answer.finish_reason.is_some(), is_finished);
    }
    assert_eq!((stepped, stepped_text.as_str()), (tokens.clone(), text.as_str()));
    // The end again, and again.
    let end = step(client, &json!({"seq_id": "a", "step_index": tokens.len()})).await;
    assert!(end.finished && end.tokens.is_empty() && end.token.is_none());
    // A step of one token has it beside the list, as simple clients expect it; longer steps do not.
    for (n, expected) in [(1, json!(tokens[1])), (2, Value::Null)] {
        let body = json!({"seq_id": "a", "step_index": 1, "n": n});
        let answer = client.ask("/inference/step", &body).await;
        assert_eq!((&answer["token"], &answer["tokens"]), (&expected, &json!(tokens[1..=n])));
    }

    let body = json!({"prompt": PROMPT, "sampling": greedy(20)});
    let mut events = client.events("/inference/generate", &body).await;
    assert_eq!(events.pop().unwrap(), "[DONE]");
    let mut streamed = (Vec::new(), String::new());
    for event in events {
        match serde_json::from_str(&event).unwrap() {
            GenerateEvent::Token { token, text, .. } => {
                streamed.0.push(token);
                streamed.1.push_str(&text);
            }
            GenerateEvent::Finished { text, completion_tokens, .. } => {
                streamed.1.push_str(&text);
                assert_eq!(completion_tokens, tokens.len());
            }
            GenerateEvent::Error { message } => panic!("{message}"),
        }
    }
    assert_eq!(streamed, (tokens, text));
    worker.end().await;
}

#[tokio::test]
async fn a_step_that_is_repeated_gives_the_same_tokens_and_one_of_the_future_409() {
    let worker = start().await;
    let client = &worker.client;
    let (tokens, _) = engine_alone(tokens_of(PROMPT), SamplingParams::greedy(20));
    init(client, "a", &tokens_of(PROMPT), 20).await;
    let body = json!({"seq_id": "a", "n": 4, "step_index": 1});
    let first = step(client, &body).await;
    assert_eq!(first.tokens, tokens[1..5]);
    assert_eq!(step(client, &body).await, first);
    // A wider step over what is known and what is not.
    assert_eq!(step(client, &json!({"seq_id": "a", "n": 6, "step_index": 3})).await.tokens, tokens[3..9]);
    assert_eq!(step(client, &body).await, first);
    // Without an index: after the last answer.
    assert_eq!(step(client, &json!({"seq_id": "a"})).await.tokens, tokens[9..10]);
    let future = client.post("/inference/step", &json!({"seq_id": "a", "step_index": 11})).await;
    assert_eq!(future.status, StatusCode::CONFLICT);
    assert_eq!(future.error().0, "`step_index` is 11; allowed: 0 to 10, the number of tokens of the output");
    for n in [0, 5000] {
        let answer = client.post("/inference/step", &json!({"seq_id": "a", "n": n})).await;
        assert_eq!((answer.status, answer.error().1), (StatusCode::BAD_REQUEST, json!("n")));
    }
    worker.end().await;
}

#[tokio::test]
async fn sampling_may_stand_beside_its_object() {
    let worker = start().await;
    let client = &worker.client;
    let (tokens, _) = engine_alone(tokens_of(PROMPT), SamplingParams::greedy(5));
    for sampling in [
        json!({"temperature": 0, "max_tokens": 5}),
        json!({"temperature": 0, "sampling": {"max_tokens": 5}}),
        json!({"temperature": 0, "sampling": {"max_tokens": 5, "temperature": 0}, "stop": "\u{1}"}),
    ] {
        let mut body = sampling;
        body["prompt"] = PROMPT.into();
        let mut events = client.events("/inference/generate", &body).await;
        assert_eq!(events.pop().unwrap(), "[DONE]");
        let streamed: Vec<u32> = events
            .iter()
            .filter_map(|event| match serde_json::from_str(event).unwrap() {
                GenerateEvent::Token { token, .. } => Some(token),
                _ => None,
            })
            .collect();
        assert_eq!(streamed, tokens, "{body}");
        body["seq_id"] = "a".into();
        let started = client.ask("/inference/init", &body).await;
        assert_eq!(started["tokens_so_far"], json!(tokens[..1]));
        let rest = step(client, &json!({"seq_id": "a", "n": 9})).await;
        assert_eq!((rest.tokens.as_slice(), rest.finished), (&tokens[1..], true), "{body}");
    }
    for path in ["/inference/init", "/inference/generate"] {
        for (field, beside, inside) in [
            ("max_tokens", json!(5), json!(6)),
            ("ignore_eos", json!(true), json!(false)),
            ("stop", json!("a"), json!(["b"])),
        ] {
            let mut body = json!({"seq_id": "b", "prompt": "x", "sampling": {}});
            body[field] = beside;
            body["sampling"][field] = inside;
            let answer = client.post(path, &body).await;
            assert_eq!((answer.status, answer.error().1), (StatusCode::BAD_REQUEST, json!(field)), "{body}");
        }
        for (body, field) in [
            (json!({"seq_id": "b", "prompt": "x", "temperature": "hot"}), "temperature"),
            (json!({"seq_id": "b", "prompt": 7}), "prompt"),
            (json!({"seq_id": "b", "token_ids": [1, "x"]}), "token_ids[1]"),
            (json!({"seq_id": "b", "messages": [{"role": "user"}]}), "messages[0]"),
            (json!({"seq_id": "b", "prompt": "x", "sampling": {"n": -1}}), "sampling.n"),
            (json!({"seq_id": "b", "prompt": "x", "sampling": {"topp": 1}}), "sampling.topp"),
        ] {
            let answer = client.post(path, &body).await;
            assert_eq!((answer.status, answer.error().1), (StatusCode::BAD_REQUEST, json!(field)), "{body}");
        }
    }
    worker.end().await;
}

#[tokio::test]
async fn sequences_that_start_beside_others_are_told_their_own_cached_tokens() {
    let worker = start().await;
    let client = &worker.client;
    let known: Vec<u32> = (100..180).collect();
    init(client, "first", &known, 2).await;
    let unknown = |first: u32| (first..first + 40).collect::<Vec<u32>>();
    let streamed = json!({"prompt": known, "max_tokens": 30, "ignore_eos": true, "stream": true});
    let (prompt_a, prompt_b, prompt_c) = (unknown(300), [known.as_slice(), &[7]].concat(), unknown(400));
    let (a, b, c, _, d) = tokio::join!(
        init(client, "a", &prompt_a, 4),
        init(client, "b", &prompt_b, 4),
        init(client, "c", &prompt_c, 4),
        client.events("/v1/completions", &streamed),
        init(client, "d", &known, 4),
    );
    assert_eq!([a, b, c, d].map(|started| started.cached_tokens), [0, 80, 0, 64]);
    worker.end().await;
}

#[tokio::test]
async fn concurrent_steps_of_a_sequence_are_made_once() {
    let worker = start().await;
    let client = &worker.client;
    let (tokens, _) = engine_alone(tokens_of(PROMPT), SamplingParams::greedy(60));
    init(client, "a", &tokens_of(PROMPT), 60).await;
    let body = json!({"seq_id": "a", "n": 10, "step_index": 1});
    let (a, b, c, d) =
        tokio::join!(step(client, &body), step(client, &body), step(client, &body), step(client, &body));
    assert_eq!(a.tokens, tokens[1..11]);
    assert!(a == b && b == c && c == d);
    // Those without an index each make their own.
    let body = json!({"seq_id": "a", "n": 5});
    let (a, b, c) = tokio::join!(step(client, &body), step(client, &body), step(client, &body));
    let mut answers = [a, b, c];
    answers.sort_by_key(|answer| answer.step_index);
    let joined: Vec<u32> = answers.iter().flat_map(|answer| answer.tokens.clone()).collect();
    assert_eq!(joined, tokens[11..26]);
    worker.end().await;
}

#[tokio::test]
async fn many_sequences_are_stepped_beside_streams_and_do_not_disturb_each_other() {
    let worker = start().await;
    let client = &worker.client;
    let stepping = async |idx: u32| {
        let prompt = vec![1, 70 + idx, 90 + idx];
        let (expected, _) = engine_alone(prompt.clone(), SamplingParams::greedy(12));
        let name = format!("s{idx}");
        let started = init(client, &name, &prompt, 12).await;
        let (mut tokens, mut is_finished) = (started.tokens_so_far, started.finished);
        while !is_finished {
            let answer =
                step(client, &json!({"seq_id": name, "n": 1 + idx, "step_index": tokens.len()})).await;
            tokens.extend(answer.tokens);
            is_finished = answer.finished;
        }
        assert_eq!(tokens, expected);
    };
    let body = json!({"prompt": PROMPT, "max_tokens": 60, "ignore_eos": true, "stream": true});
    tokio::join!(stepping(0), stepping(1), stepping(2), client.events("/v1/completions", &body), stepping(3));
    worker.end().await;
}

#[tokio::test]
async fn a_finished_sequence_stays_and_its_next_turn_continues_it() {
    let worker = start().await;
    let client = &worker.client;
    let prompt = tokens_of(PROMPT);
    let started = init(client, "a", &prompt, 20).await;
    let more = step(client, &json!({"seq_id": "a", "n": 4})).await;
    let finished = client.ask("/inference/finish", &json!({"seq_id": "a"})).await;
    // The last token has been chosen but not computed.
    let n_resident = prompt.len() + 4;
    assert_eq!(finished["resident_tokens"], n_resident);
    assert_eq!(client.post("/inference/step", &json!({"seq_id": "a"})).await.status, StatusCode::NOT_FOUND);
    let next = [prompt.as_slice(), &started.tokens_so_far, &more.tokens, &[200, 201]].concat();
    let again = init(client, "a", &next, 8).await;
    assert_eq!(again.cached_tokens, n_resident);
    assert_eq!(again.tokens_so_far, engine_alone(next, SamplingParams::greedy(8)).0[..1]);
    let forgotten = client.ask("/inference/finish", &json!({"seq_id": "a", "forget": true})).await;
    assert_eq!(forgotten["resident_tokens"], 0);
    let stats = client.kv_stats().await;
    assert_eq!((stats.running_sequences, stats.resident_sequences), (0, 0));
    assert_eq!(stats.free_blocks, stats.blocks);
    worker.end().await;
}

#[tokio::test]
async fn completions_of_one_name_continue_each_other() {
    let worker = start().await;
    let client = &worker.client;
    let body = json!({"prompt": tokens_of(PROMPT), "seq_id": "a", "max_tokens": 7, "temperature": 0,
                      "return_token_ids": true});
    let answer = client.ask("/v1/completions", &body).await;
    let output: Vec<u32> = serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap();
    let next = [tokens_of(PROMPT), output, vec![300]].concat();
    let n_resident = next.len() - 2;
    let body = json!({"prompt": next, "seq_id": "a", "max_tokens": 3, "temperature": 0});
    let answer = client.ask("/v1/completions", &body).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], n_resident);
    worker.end().await;
}

#[tokio::test]
async fn sequences_that_are_unknown_or_busy_are_refused() {
    let worker = start().await;
    let client = &worker.client;
    for path in ["/inference/step", "/inference/finish"] {
        let answer = client.post(path, &json!({"seq_id": "nobody"})).await;
        assert_eq!((answer.status, answer.error().1), (StatusCode::NOT_FOUND, json!("seq_id")));
    }
    init(client, "a", &[1, 70], 20).await;
    let again = client.post("/inference/init", &json!({"seq_id": "a", "prompt": "x"})).await;
    assert_eq!(again.status, StatusCode::CONFLICT);
    let completion = client.post("/v1/completions", &json!({"seq_id": "a", "prompt": "x"})).await;
    assert_eq!(completion.status, StatusCode::CONFLICT);
    for (body, field) in [
        (json!({"seq_id": "b"}), "prompt"),
        (json!({"seq_id": "b", "prompt": "x", "token_ids": [1]}), "prompt"),
        (json!({"seq_id": "b", "token_ids": []}), "token_ids"),
        (json!({"seq_id": "b", "token_ids": [5000]}), "token_ids"),
        (json!({"seq_id": "", "prompt": "x"}), "seq_id"),
        (json!({"seq_id": "b", "prompt": "x", "sampling": {"n": 2}}), "n"),
        (json!({"seq_id": "b", "prompt": "x", "sampling": {"top_p": 7}}), "top_p"),
        (json!({"seq_id": "b", "prompt": "x", "sampling": {"logprobs": 2}}), "logprobs"),
        (json!({"seq_id": "b", "prompt": "x", "sampling": {"stop": [""]}}), "stop"),
    ] {
        let answer = client.post("/inference/init", &body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
        assert_eq!(answer.error().1, field, "{body}");
    }
    let unknown = json!({"seq_id": "b", "prompt": "x", "sampling": {"topp": 1}});
    assert_eq!(client.post("/inference/init", &unknown).await.status, StatusCode::BAD_REQUEST);
    // Nothing of the refused ones stays: the name is free.
    init(client, "b", &[1, 71], 3).await;
    worker.end().await;
}

#[tokio::test]
async fn an_abandoned_sequence_ends_and_stays_resident() {
    let mut config = crate::support::config();
    config.idle_timeout_s = 1;
    let worker = crate::support::start_with(config).await;
    init(&worker.client, "a", &tokens_of(PROMPT), 50).await;
    assert_eq!(worker.client.kv_stats().await.running_sequences, 1);
    worker.client.wait_for_stats(|stats| stats.running_sequences == 0 && stats.resident_sequences == 1).await;
    let answer = worker.client.post("/inference/step", &json!({"seq_id": "a"})).await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    worker.end().await;
}
