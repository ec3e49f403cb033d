//! What engines of other projects are told, as a server hears it.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use http::{Method, StatusCode, Uri};
use kvik_proto::client::{TlsClientConfig, http_client};
use parking_lot::Mutex;

use super::native;
use crate::calls::EngineCalls;
use crate::config::{SleepMethod, VllmSleep};

/// A server that answers as told and writes down what it is asked.
#[derive(Debug, Default)]
struct Fake {
    heard: Mutex<Vec<String>>,
    is_sleeping: Mutex<bool>,
    /// The path that fails.
    broken: Option<&'static str>,
}

async fn answer(
    State(fake): State<Arc<Fake>>,
    method: Method,
    uri: Uri,
    body: Bytes,
) -> (StatusCode, String) {
    fake.heard.lock().push(format!("{method} {uri} {}", String::from_utf8_lossy(&body)).trim().to_owned());
    match uri.path() {
        path if fake.broken == Some(path) => return (StatusCode::INTERNAL_SERVER_ERROR, "no".to_owned()),
        "/sleep" => *fake.is_sleeping.lock() = true,
        "/wake_up" => *fake.is_sleeping.lock() = false,
        "/is_sleeping" => {
            return (StatusCode::OK, format!("{{\"is_sleeping\": {}}}", *fake.is_sleeping.lock()));
        }
        "/update_weights_from_disk" => return (StatusCode::OK, "{\"success\": true}".to_owned()),
        _ => {}
    }
    (StatusCode::OK, String::new())
}

async fn heard(method: SleepMethod, fake: Fake) -> (Vec<String>, Result<(), String>, Result<(), String>) {
    let fake = Arc::new(fake);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let router = Router::new().fallback(answer).with_state(Arc::clone(&fake));
    let server = tokio::spawn(async move { axum::serve(listener, router).await });
    let calls = EngineCalls::new(http_client(&TlsClientConfig::default()).unwrap(), base);
    let sleeper = native(&method).unwrap();
    let slept = sleeper.release(&calls).await;
    let woke = sleeper.resume(&calls).await;
    server.abort();
    let heard = fake.heard.lock().clone();
    (heard, slept, woke)
}

#[tokio::test]
async fn vllm_sleeps_as_deep_as_it_is_told() {
    for (depth, expected) in [
        (
            VllmSleep::KvCache,
            vec![
                "POST /sleep?level=0&mode=keep",
                "POST /release_kv_cache_memory",
                "POST /wake_up?tags=kv_cache",
                "GET /is_sleeping",
            ],
        ),
        (
            VllmSleep::Level1,
            vec!["POST /sleep?level=1", "GET /is_sleeping", "POST /wake_up", "GET /is_sleeping"],
        ),
        (
            VllmSleep::Level2,
            vec![
                "POST /sleep?level=2",
                "GET /is_sleeping",
                "POST /wake_up?tags=weights",
                "POST /collective_rpc {\"method\":\"reload_weights\"}",
                "POST /wake_up?tags=kv_cache",
                "GET /is_sleeping",
            ],
        ),
    ] {
        let (heard, slept, woke) = heard(SleepMethod::Vllm(depth), Fake::default()).await;
        assert_eq!((heard, slept, woke), (expected.into_iter().map(str::to_owned).collect(), Ok(()), Ok(())));
    }
}

#[tokio::test]
async fn sglang_reads_its_weights_again() {
    let method = SleepMethod::Sglang { weights: "org/model".to_owned() };
    let (heard, slept, woke) = heard(method, Fake::default()).await;
    let expected = [
        "POST /release_memory_occupation {}",
        "POST /resume_memory_occupation {}",
        "POST /update_weights_from_disk {\"model_path\":\"org/model\"}",
    ];
    assert_eq!(heard, expected);
    assert_eq!((slept, woke), (Ok(()), Ok(())));
}

#[tokio::test]
async fn a_wake_without_its_weights_is_an_error() {
    let fake = Fake { broken: Some("/update_weights_from_disk"), ..Fake::default() };
    let (_, slept, woke) = heard(SleepMethod::Sglang { weights: "m".to_owned() }, fake).await;
    assert_eq!(slept, Ok(()));
    let why = woke.unwrap_err();
    assert!(why.contains("/update_weights_from_disk: 500"), "{why}");
    let fake = Fake { broken: Some("/collective_rpc"), ..Fake::default() };
    let (heard, _, woke) = heard(SleepMethod::Vllm(VllmSleep::Level2), fake).await;
    assert!(woke.is_err());
    assert!(!heard.iter().any(|call| call.contains("tags=kv_cache")), "{heard:?}");
}
