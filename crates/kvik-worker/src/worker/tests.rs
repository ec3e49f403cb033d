//! A worker whose device is lost.

use axum::routing::post;
use axum::{Json, Router};
use http::StatusCode;
use kvik_proto::coordinator::{HeartbeatResponse, RegisterResponse, WorkerState as MemberState};
use kvik_runtime::http::ListenLimits;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::*;
use crate::engine_thread::fragile::{LOSES_ON, fragile_engine};

#[expect(clippy::unnecessary_wraps, reason = "what loads engines may fail")]
fn load_fragile(_: &WorkerConfig, _: &Shutdown) -> Result<LoadedEngine> {
    let (model, engine, _) = fragile_engine();
    Ok((model, engine, None, None))
}

/// A coordinator that tells when workers come and leave.
async fn coordinator(shutdown: &Shutdown) -> (String, mpsc::UnboundedReceiver<&'static str>) {
    let listener = listen("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let (sender, told) = mpsc::unbounded_channel();
    let (coming, leaving) = (sender.clone(), sender);
    let router = Router::new()
        .route(
            "/register",
            post(async move || {
                let _ = coming.send("came");
                Json(RegisterResponse { heartbeat_interval_ms: 60_000, term: 1 })
            }),
        )
        .route("/heartbeat", post(async || Json(HeartbeatResponse { state: MemberState::Ready, term: 1 })))
        .route(
            "/deregister",
            post(async move || {
                let _ = leaving.send("left");
                StatusCode::NO_CONTENT
            }),
        );
    let server = shutdown.clone();
    shutdown.spawn(async move {
        serve(listener, router, None, &ListenLimits::default(), std::future::pending(), &server).await;
    });
    (base, told)
}

/// Sends a request; the whole answer.
async fn ask(address: SocketAddr, request: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let length = body.len();
    let text = format!(
        "{request} HTTP/1.1\r\nhost: worker\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
         connection: close\r\n\r\n{body}"
    );
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn a_worker_whose_device_is_lost_says_so_leaves_its_coordinator_and_ends_with_an_error() {
    let shutdown = Shutdown::new();
    let (base, mut told) = coordinator(&shutdown).await;
    let config = WorkerConfig {
        listen: "127.0.0.1:0".to_owned(),
        coordinators: vec![base],
        ..WorkerConfig::default()
    };
    let running = Worker::run(config, &shutdown, load_fragile).await.unwrap();
    assert_eq!(told.recv().await, Some("came"));
    assert!(ask(running.address(), "GET /ready", "").await.starts_with("HTTP/1.1 200 "));
    running.outcome().unwrap();

    let body = format!(r#"{{"model": "kvik-tiny", "prompt": [1, {LOSES_ON}], "max_tokens": 5}}"#);
    let answer = ask(running.address(), "POST /v1/completions", &body).await;
    // As from a worker that ends: clients and gateways try another one.
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    assert!(answer.to_lowercase().contains("\r\nretry-after: 1\r\n"), "{answer}");
    assert!(answer.contains("the worker has lost its device and ends; try again"), "{answer}");

    // Long before its next heartbeat.
    assert_eq!(told.recv().await, Some("left"));
    running.closed().await;
    let error = running.outcome().unwrap_err();
    assert!(matches!(error, WorkerError::EngineFailed { .. }), "{error}");
    assert!(
        error.to_string().starts_with("the engine failed: the device is lost: cuStreamSynchronize"),
        "{error}"
    );
    assert!(TcpStream::connect(running.address()).await.is_err(), "it listens no more");
    shutdown.finish().await;
}

#[tokio::test]
async fn a_worker_that_is_told_to_end_has_not_failed() {
    let shutdown = Shutdown::new();
    let config = WorkerConfig { listen: "127.0.0.1:0".to_owned(), ..WorkerConfig::default() };
    let running = Worker::run(config, &shutdown, load_fragile).await.unwrap();
    running.drain();
    running.closed().await;
    running.outcome().unwrap();
    shutdown.finish().await;
}

#[test]
fn a_worker_on_a_gpu_registers_its_own_store_and_leaves_a_daemons_alone() {
    let mut config = StoreConfig::default();
    assert_eq!(store_of_device(&config, Some(2)).cuda_device, Some(2));
    assert_eq!(store_of_device(&config, None), config);
    config.daemon = Some("/run/kvik/store.sock".into());
    let config = store_of_device(&config, Some(2));
    assert!(config.daemon().unwrap().is_some());
}
