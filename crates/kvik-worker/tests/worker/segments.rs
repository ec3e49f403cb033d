//! Prompts that are put together from segments.

use http::StatusCode;
use kvik_model::Model;
use kvik_runtime::shutdown::Shutdown;
use kvik_worker::{StoreConfig, Worker, WorkerConfig};
use serde_json::{Value, json};

use crate::support::{TestWorker, config, start_with};

const NOTES: [&str; 3] = [
    "Note 1: In Quarry there is a builder named Olga. Olga has a striped chair, and it is in the forest.\n",
    "Note 2: Zajoda keeps a white boat in the tent. Zajoda lives in Wexley and works as a gardener.\n",
    "Note 3: Felix is a fisher. The home of Felix is in Farrow. The grey boat in the cellar is owned by Felix.\n",
];
const QUESTION: &str = "Question: What is the job of Zajoda?\nAnswer:";

fn with_ram() -> WorkerConfig {
    WorkerConfig { store: StoreConfig { ram: "64MiB".to_owned(), ..StoreConfig::default() }, ..config() }
}

fn parts(order: &[usize]) -> Vec<Value> {
    let notes = order.iter().map(|&idx| json!({"text": NOTES[idx], "reusable": true}));
    notes.chain([json!({"text": QUESTION})]).collect()
}

fn prompt(order: &[usize]) -> String {
    order.iter().map(|&idx| NOTES[idx]).chain([QUESTION]).collect()
}

/// The text and the details of the prompt's usage.
async fn complete(worker: &TestWorker, prompt: &str, kvik: Value) -> (String, Value) {
    let mut body = json!({"prompt": prompt, "max_tokens": 10, "temperature": 0});
    if !kvik.is_null() {
        body["kvik"] = kvik;
    }
    let answer = worker.client.ask("/v1/completions", &body).await;
    let text = answer["choices"][0]["text"].as_str().unwrap().to_owned();
    (text, answer["usage"]["prompt_tokens_details"].clone())
}

/// Chunks that the store has in all its tiers.
async fn n_stored(worker: &TestWorker) -> u64 {
    let stats = worker.client.get("/cache/stats").await.json();
    stats["tiers"].as_array().unwrap().iter().filter_map(|tier| tier["chunks"].as_u64()).sum()
}

#[tokio::test]
async fn documents_in_any_order_are_put_together_from_what_was_computed_before() {
    let worker = start_with(with_ram()).await;
    let exact = complete(&worker, &prompt(&[0, 1, 2]), Value::Null).await.0;
    // All tokens selected: the text of plain prefill.
    let kvik = json!({"segments": parts(&[0, 1, 2]), "blend": "all"});
    let (text, details) = complete(&worker, "", kvik).await;
    assert_eq!(text, exact);
    let n_blended = details["blended_tokens"].as_u64().unwrap();
    assert_eq!(
        (details["recomputed_tokens"].as_u64().unwrap(), &details["blend"]),
        (n_blended, &json!("all"))
    );
    for order in [[2, 0, 1], [1, 2, 0]] {
        let kvik = json!({"segments": parts(&order), "blend": {"selector": "none"}});
        let (first, details) = complete(&worker, "", kvik.clone()).await;
        assert_eq!((&details["blended_tokens"], &details["blend"]), (&json!(n_blended), &json!("none")));
        assert!(details.get("recomputed_tokens").is_none() && details["cached_tokens"] == 0);
        // The same parts, named in the prompt instead of being it.
        assert_eq!(complete(&worker, &prompt(&order), kvik).await, (first, details));
    }
    // What was put together is no prefix of what is exact.
    let (text, details) = complete(&worker, &prompt(&[2, 0, 1]), Value::Null).await;
    assert_eq!(details["cached_tokens"], 0);
    let (again, details) = complete(&worker, &prompt(&[2, 0, 1]), Value::Null).await;
    assert!(text == again && details["cached_tokens"].as_u64().unwrap() > 0);
    worker.end().await;
}

#[tokio::test]
async fn segments_outlive_the_worker_on_its_disk() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = Some(format!("{}:256MiB", folder.path().display()));
    let store = StoreConfig { ram: "64MiB".to_owned(), nvme, ..StoreConfig::default() };
    let kvik = json!({"segments": parts(&[0, 1, 2]), "blend": "none"});
    let worker = start_with(WorkerConfig { store: store.clone(), ..config() }).await;
    let cold = complete(&worker, "", kvik.clone()).await;
    worker.end().await;
    let worker = start_with(WorkerConfig { store, ..config() }).await;
    assert_eq!(n_stored(&worker).await, 3, "a note each, on the disk");
    assert_eq!(complete(&worker, "", kvik).await, cold);
    // What was read is in memory too now; a note that had been computed would be written there in the background.
    assert_eq!(n_stored(&worker).await, 6);
    worker.end().await;
}

#[tokio::test]
async fn segments_behind_another_priming_context_are_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = Some(format!("{}:256MiB", folder.path().display()));
    let store = StoreConfig { ram: "64MiB".to_owned(), nvme, ..StoreConfig::default() };
    let texts: Vec<Value> = NOTES.iter().map(|note| json!({"text": note})).collect();
    let context = "Note 0: There are notes before this one, and others behind it.\n";
    let mut answers = Vec::new();
    for (priming, n_computed) in [(None, 3), (Some(context), 3), (Some("Note 0.\n"), 3), (Some(context), 0)] {
        let blend_priming = priming.map(str::to_owned);
        let worker = start_with(WorkerConfig { blend_priming, store: store.clone(), ..config() }).await;
        let added = worker.client.ask("/cache/segments", &json!({"segments": texts})).await;
        assert_eq!(added["computed_segments"], n_computed, "{priming:?}");
        let kvik = json!({"segments": parts(&[0, 1, 2]), "blend": "none"});
        let body = json!({"prompt": "", "max_tokens": 4, "temperature": 0, "logprobs": 1, "kvik": kvik});
        let answer = worker.client.ask("/v1/completions", &body).await;
        answers.push(answer["choices"][0]["logprobs"].clone());
        // With every token computed again, the prompt is any other's.
        let exact = complete(&worker, &prompt(&[2, 0, 1]), Value::Null).await.0;
        let all = json!({"segments": parts(&[2, 0, 1]), "blend": "all"});
        assert_eq!(complete(&worker, "", all).await.0, exact);
        worker.end().await;
    }
    assert_eq!(answers[1], answers[3], "computed and from the disk");
    assert!(answers[0] != answers[1] && answers[1] != answers[2], "the context matters: {answers:?}");
    let long = Some("note ".repeat(5000));
    let refused = WorkerConfig { blend_priming: long, ..config() };
    let error = Worker::start(refused, &Shutdown::new()).await.unwrap_err().to_string();
    assert!(error.contains("`blend_priming` is") && error.contains("fewer tokens"), "{error}");
}

#[tokio::test]
async fn parts_of_messages_and_separators_name_segments_too() {
    let worker = start_with(with_ram()).await;
    let content: Vec<Value> = NOTES
        .iter()
        .map(|note| json!({"type": "text", "text": note, "reusable": true}))
        .chain([json!({"type": "text", "text": "What is the job of Zajoda?"})])
        .collect();
    let mut body =
        json!({"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0});
    let plain = worker.client.ask("/v1/chat/completions", &body).await;
    assert!(
        plain["usage"]["prompt_tokens_details"].get("blended_tokens").is_none(),
        "off by default: {plain}"
    );
    body["kvik"] = json!({"blend": "all"});
    let blended = worker.client.ask("/v1/chat/completions", &body).await;
    assert!(blended["usage"]["prompt_tokens_details"]["blended_tokens"].as_u64().unwrap() > 60, "{blended}");

    let separated = [NOTES[0], NOTES[1], QUESTION].join(" # # ");
    let kvik = json!({"separator": " # # ", "blend": "first:2"});
    let (_, details) = complete(&worker, &separated, kvik).await;
    assert_eq!(details["recomputed_tokens"], 4, "two tokens of each note: {details}");

    let input = json!({"kvik": {"segments": parts(&[0, 1]), "blend": "none"}, "max_tokens": 3});
    let events = worker.client.events("/inference/generate", &input).await;
    assert!(events.iter().any(|event| event.contains("finish_reason")), "{events:?}");
    worker.end().await;
}

#[tokio::test]
async fn settings_of_lmcache_cut_prompts_at_their_separator() {
    let store = StoreConfig {
        enable_blending: Some(true),
        blend_min_tokens: Some(20),
        blend_recompute_ratios: Some(vec![0.5]),
        ..with_ram().store
    };
    let worker = start_with(WorkerConfig { store, ..config() }).await;
    let separated = [NOTES[0], "Too short.", NOTES[1], QUESTION].join(" # # ");
    let (_, details) = complete(&worker, &separated, Value::Null).await;
    let (n_blended, n_again) =
        (details["blended_tokens"].as_u64().unwrap(), details["recomputed_tokens"].as_u64().unwrap());
    assert!(n_again == n_blended.div_ceil(2) && details["blend"] == "deviation:0.5@1", "{details}");
    let (_, details) = complete(&worker, &prompt(&[0, 1]), Value::Null).await;
    assert!(details.get("blended_tokens").is_none(), "no separator: {details}");
    worker.end().await;
}

#[tokio::test]
async fn a_model_that_is_trained_for_segments_uses_them_unasked() {
    let folder = tempfile::tempdir().unwrap();
    Model::write_bundled(folder.path()).unwrap();
    let path = folder.path().join("config.json");
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    settings["kvik"] = json!({"blend": "exact"});
    std::fs::write(&path, settings.to_string()).unwrap();
    let model = Some(folder.path().to_owned());
    let worker = start_with(WorkerConfig { model: model.clone(), ..with_ram() }).await;
    let (_, details) = complete(&worker, "", json!({"segments": parts(&[0, 1, 2])})).await;
    assert_eq!(details["blend"], "none");
    worker.end().await;
    // The operator's word counts more, and a request's most.
    let worker = start_with(WorkerConfig { model, blend: Some("first:4".to_owned()), ..with_ram() }).await;
    let (_, details) = complete(&worker, "", json!({"segments": parts(&[0, 1, 2])})).await;
    assert_eq!((&details["blend"], &details["recomputed_tokens"]), (&json!("first:4"), &json!(12)));
    let (_, details) = complete(&worker, "", json!({"segments": parts(&[0]), "blend": "random:0.5"})).await;
    assert_eq!(details["blend"], "random:0.5");
    worker.end().await;
}

#[tokio::test]
async fn requests_that_name_segments_wrongly_are_refused_by_field() {
    let worker = start_with(with_ram()).await;
    let both = json!([{"text": "a", "token_ids": [1], "reusable": true}]);
    for (kvik, field) in [
        (json!({"segments": parts(&[0]), "blend": "kv:1"}), "kvik.blend"),
        (json!({"segments": both}), "kvik.segments[0]"),
        (json!({"segments": [{"reusable": true}]}), "kvik.segments[0]"),
        (json!({"segments": parts(&[0]), "separator": "#"}), "kvik.separator"),
        (json!({"separator": ""}), "kvik.separator"),
        (json!({"segmentz": []}), "segmentz"),
        (json!({"segments": [{"token_ids": [4_000_000], "reusable": true}]}), "kvik.segments"),
    ] {
        let body = json!({"prompt": "", "max_tokens": 2, "kvik": kvik});
        let answer = worker.client.post("/v1/completions", &body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{kvik}");
        assert!(answer.text().contains(field), "{kvik}: {}", answer.text());
    }
    let named = json!({"prompt": "", "seq_id": "s", "kvik": {"segments": parts(&[0]), "blend": "none"}});
    let answer = worker.client.post("/v1/completions", &named).await;
    assert!(
        answer.status == StatusCode::BAD_REQUEST && answer.text().contains("seq_id"),
        "{}",
        answer.text()
    );
    worker.end().await;
}

#[tokio::test]
async fn segments_are_computed_ahead_and_once() {
    let worker = start_with(with_ram()).await;
    let texts: Vec<Value> = NOTES.iter().map(|note| json!({"text": note})).collect();
    let added = worker.client.ask("/cache/segments", &json!({"segments": texts})).await;
    assert_eq!((&added["computed_segments"], &added["present_segments"]), (&json!(3), &json!(0)));
    // The same segment twice in one prompt, and beside another that is new.
    let kvik = json!({"segments": parts(&[1, 0, 1]), "blend": "none"});
    let (_, details) = complete(&worker, "", kvik).await;
    let again = worker.client.ask("/cache/segments", &json!({"segments": texts})).await;
    assert_eq!((&again["computed_segments"], &again["present_segments"]), (&json!(0), &json!(3)));
    assert_eq!(again["tokens"], added["tokens"]);
    assert!(details["blended_tokens"].as_u64().unwrap() > 60, "{details}");
    // Another salt has none of them.
    let salted = json!({"segments": texts, "cache_salt": "other"});
    assert_eq!(worker.client.ask("/cache/segments", &salted).await["computed_segments"], 3);
    let long = json!({"segments": [{"token_ids": vec![7; 100_000]}]});
    assert_eq!(worker.client.post("/cache/segments", &long).await.status, StatusCode::BAD_REQUEST);
    worker.end().await;
    let worker = start_with(config()).await;
    let answer = worker.client.post("/cache/segments", &json!({"segments": texts})).await;
    assert!(answer.status == StatusCode::NOT_FOUND && answer.text().contains("store"), "{}", answer.text());
    worker.end().await;
}
