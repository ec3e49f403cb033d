//! Clients that go away, and the worker's end.

use http::{Method, StatusCode};
use kvik_runtime::shutdown::Shutdown;
use kvik_worker::{Worker, WorkerConfig};
use serde_json::{Value, json};

use crate::support::{config, start, start_with};

const PATH: &str = "/v1/completions";

fn long(max_tokens: u32) -> Value {
    json!({"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": true, "stream": true})
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_sequences() {
    let worker = start().await;
    for _ in 0..5 {
        let mut streams = Vec::new();
        for _ in 0..8 {
            let mut stream = worker.client.stream(PATH, &long(4000)).await;
            stream.next().await.unwrap();
            streams.push(stream);
        }
        assert_eq!(worker.client.kv_stats().await.running_sequences, 8);
        drop(streams);
        let stats = worker
            .client
            .wait_for_stats(|stats| stats.running_sequences + stats.waiting_sequences == 0)
            .await;
        assert_eq!(stats.free_blocks, stats.blocks);
    }
    // Also one that waits for its whole answer.
    let mut body = long(4000);
    body["stream"] = false.into();
    let waiting = worker.client.post(PATH, &body);
    tokio::select! {
        _ = waiting => panic!("it cannot be done yet"),
        _ = worker.client.wait_for_stats(|stats| stats.running_sequences == 1) => {}
    }
    worker.client.wait_for_stats(|stats| stats.running_sequences == 0).await;
    worker.end().await;
}

#[tokio::test]
async fn a_drain_under_load_loses_no_request_and_takes_no_new_one() {
    let worker = start().await;
    let client = worker.client.clone();
    let mut streams = Vec::new();
    for idx in 0..6 {
        let mut stream = client.stream(PATH, &long(150 + idx * 10)).await;
        stream.next().await.unwrap();
        streams.push(stream);
    }
    let stepped = json!({"seq_id": "a", "prompt": "x", "sampling": {"max_tokens": 30, "ignore_eos": true}});
    client.ask("/inference/init", &stepped).await;
    assert_eq!(client.get("/ready").await.status, StatusCode::OK);
    assert_eq!(client.send(Method::POST, "/drain", Vec::new()).await.status, StatusCode::ACCEPTED);
    assert_eq!(client.get("/ready").await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(client.get("/health").await.status, StatusCode::OK);
    let refused = client.post(PATH, &json!({"prompt": "a"})).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(refused.json()["error"]["type"], "server_error");
    for mut stream in streams {
        let mut last = String::new();
        let mut reason = Value::Null;
        while let Some(event) = stream.next().await {
            if let Ok(chunk) = serde_json::from_str::<Value>(&event) {
                assert!(chunk["error"].is_null(), "{chunk}");
                reason = chunk["choices"][0]["finish_reason"].clone();
            }
            last = event;
        }
        assert_eq!((last.as_str(), reason), ("[DONE]", json!("length")));
    }
    // A stepped sequence is led to its end too; only then the worker closes.
    let end = client.ask("/inference/step", &json!({"seq_id": "a", "n": 40})).await;
    assert_eq!(end["finished"], true);
    worker.running.closed().await;
    assert!(client.try_send(Method::GET, "/health", Vec::new()).await.is_none());
    worker.shutdown.finish().await;
}

#[tokio::test]
async fn what_outlives_the_grace_ends_with_an_error_event() {
    let mut config = config();
    config.drain_grace_s = 0;
    let worker = start_with(config).await;
    let mut stream = worker.client.stream(PATH, &long(4000)).await;
    stream.next().await.unwrap();
    worker.shutdown.drain();
    let mut last = String::new();
    while let Some(event) = stream.next().await {
        last = event;
    }
    let error: Value = serde_json::from_str(&last).unwrap();
    assert_eq!(error["error"]["type"], "server_error");
    drop(stream);
    worker.running.closed().await;
    worker.shutdown.finish().await;
}

#[tokio::test]
async fn a_stop_ends_everything_at_once() {
    let worker = start().await;
    let mut stream = worker.client.stream(PATH, &long(4000)).await;
    stream.next().await.unwrap();
    worker.end().await;
}

#[tokio::test]
async fn a_worker_that_cannot_start_leaves_nothing_behind() {
    let shutdown = Shutdown::new();
    let start = async |change: fn(&mut WorkerConfig)| {
        let mut config = config();
        change(&mut config);
        Worker::start(config, &shutdown).await.unwrap_err().to_string()
    };
    let message = start(|config| config.model = Some("/no/such/model".into())).await;
    assert!(
        message.starts_with("load the model: `model` is /no/such/model, which is missing; "),
        "{message}"
    );
    let message = start(|config| config.model = Some("/dev/null".into())).await;
    assert!(
        message.starts_with("load the model: `model` is /dev/null, which is not a folder; "),
        "{message}"
    );
    assert!(start(|config| config.threads = 5000).await.contains("`threads` is 5000"));
    assert!(start(|config| config.listen = "nowhere".into()).await.contains("listen on nowhere"));
    shutdown.finish().await;
}

#[tokio::test]
async fn metrics_have_the_names_that_dashboards_know() {
    kvik_runtime::telemetry::start_metrics().unwrap();
    let mut config = config();
    config.id = Some("measured".to_owned());
    let worker = start_with(config).await;
    worker.client.ask(PATH, &json!({"prompt": "Once upon", "max_tokens": 4, "ignore_eos": true})).await;
    worker.client.post(PATH, &json!({"prompt": []})).await;
    let text = worker.client.get("/metrics").await.text();
    for line in [
        "vllm:num_requests_running{model_name=\"kvik-tiny\",engine=\"measured\"} 0",
        "vllm:num_requests_waiting{",
        "vllm:kv_cache_usage_perc{",
        "vllm:prefix_cache_queries_total{",
        "vllm:prefix_cache_hits_total{",
        "vllm:prompt_tokens_total{",
        "vllm:generation_tokens_total{model_name=\"kvik-tiny\",engine=\"measured\"} 4",
        "vllm:request_success_total{model_name=\"kvik-tiny\",engine=\"measured\",finished_reason=\"length\"} 1",
        "vllm:num_preemptions_total{",
        "vllm:time_to_first_token_seconds_bucket{",
        "vllm:inter_token_latency_seconds_count{model_name=\"kvik-tiny\",engine=\"measured\"} 3",
        "vllm:time_to_first_token_seconds_count{model_name=\"kvik-tiny\",engine=\"measured\"} 1",
        "vllm:e2e_request_latency_seconds_count{model_name=\"kvik-tiny\",engine=\"measured\"} 1",
        "vllm:request_queue_time_seconds_count{model_name=\"kvik-tiny\",engine=\"measured\"} 1",
        "vllm:request_prefill_time_seconds_count{model_name=\"kvik-tiny\",engine=\"measured\"} 1",
        "vllm:request_decode_time_seconds_count{model_name=\"kvik-tiny\",engine=\"measured\"} 1",
        "kvik_worker_kv_blocks{model_name=\"kvik-tiny\",engine=\"measured\"} 1024",
        "kvik_worker_kv_blocks_limit{model_name=\"kvik-tiny\",engine=\"measured\"} 1024",
        "kvik_worker_kv_blocks_cached{model_name=\"kvik-tiny\",engine=\"measured\"} ",
        "kvik_worker_kv_blocks_evicted_total{model_name=\"kvik-tiny\",engine=\"measured\"} 0",
        "kvik_worker_kv_blocks_given_back_total{model_name=\"kvik-tiny\",engine=\"measured\"} 0",
        "process_cpu_seconds_total ",
        "process_resident_memory_bytes ",
        "kvik_worker_refused_total{model_name=\"kvik-tiny\",engine=\"measured\",status=\"400\"} 1",
    ] {
        assert!(text.contains(line), "{line} is missing in:\n{text}");
    }
    // Queue, prefill and decode are the whole of a request's time, without gap or overlap.
    let sum = |name: &str| -> f64 {
        let start = format!("vllm:{name}_seconds_sum{{model_name=\"kvik-tiny\",engine=\"measured\"}} ");
        let value = text.lines().find_map(|line| line.strip_prefix(start.as_str()));
        value.unwrap().parse().unwrap()
    };
    let (queue, prefill, decode) =
        (sum("request_queue_time"), sum("request_prefill_time"), sum("request_decode_time"));
    assert!(0.0 < prefill && 0.0 < decode, "{prefill} {decode}");
    assert!((queue + prefill - sum("time_to_first_token")).abs() < 1e-6);
    assert!((queue + prefill + decode - sum("e2e_request_latency")).abs() < 1e-6);
    worker.end().await;
}
