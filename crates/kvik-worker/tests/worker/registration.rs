//! Membership, with coordinators that only remember what they were told.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use http::StatusCode;
use kvik_proto::coordinator::{
    DeregisterRequest, HeartbeatRequest, HeartbeatResponse, RegisterRequest, RegisterResponse, WorkerState,
};
use kvik_runtime::http::{ListenLimits, listen, serve};
use kvik_runtime::shutdown::Shutdown;
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::mpsc;

use crate::support::{config, start_with};

#[derive(Debug, PartialEq)]
enum Told {
    Register(RegisterRequest),
    Heartbeat(HeartbeatRequest),
    /// A heartbeat that came while no coordinator led.
    Refused,
    Deregister(DeregisterRequest),
}

/// What the coordinator answers with.
#[derive(Debug)]
struct Book {
    members: Vec<String>,
    heartbeat_interval_ms: u64,
    asks_to_drain: bool,
    leads: bool,
}

impl Default for Book {
    fn default() -> Self {
        Self { members: Vec::new(), heartbeat_interval_ms: 20, asks_to_drain: false, leads: true }
    }
}

type Shared = State<(Arc<Mutex<Book>>, mpsc::UnboundedSender<Told>)>;

async fn register(
    State((book, told)): Shared,
    Json(request): Json<RegisterRequest>,
) -> Json<RegisterResponse> {
    let mut book = book.lock();
    book.members.push(request.worker.id.clone());
    told.send(Told::Register(request)).unwrap();
    Json(RegisterResponse { heartbeat_interval_ms: book.heartbeat_interval_ms, term: 1 })
}

async fn heartbeat(
    State((book, told)): Shared,
    Json(request): Json<HeartbeatRequest>,
) -> Result<Json<HeartbeatResponse>, StatusCode> {
    let book = book.lock();
    if !book.leads {
        let _ = told.send(Told::Refused);
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    if !book.members.contains(&request.id) {
        return Err(StatusCode::NOT_FOUND);
    }
    let state = if book.asks_to_drain { WorkerState::Draining } else { WorkerState::Ready };
    let _ = told.send(Told::Heartbeat(request));
    Ok(Json(HeartbeatResponse { state, term: 1 }))
}

async fn deregister(State((book, told)): Shared, Json(request): Json<DeregisterRequest>) -> StatusCode {
    book.lock().members.retain(|id| *id != request.id);
    let _ = told.send(Told::Deregister(request));
    StatusCode::NO_CONTENT
}

/// A coordinator on `address`: its base, what it knows, what it is told.
async fn coordinator(
    address: &str,
    shutdown: &Shutdown,
) -> (String, Arc<Mutex<Book>>, mpsc::UnboundedReceiver<Told>) {
    let listener = listen(address).await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let book = Arc::new(Mutex::new(Book::default()));
    let (sender, told) = mpsc::unbounded_channel();
    let router = Router::new()
        .route("/register", post(register))
        .route("/heartbeat", post(heartbeat))
        .route("/deregister", post(deregister))
        .with_state((Arc::clone(&book), sender));
    let server = shutdown.clone();
    shutdown.spawn(async move {
        serve(listener, router, None, &ListenLimits::default(), std::future::pending(), &server).await;
    });
    (base, book, told)
}

async fn next_registration(told: &mut mpsc::UnboundedReceiver<Told>) -> RegisterRequest {
    loop {
        if let Told::Register(request) = told.recv().await.unwrap() {
            return request;
        }
    }
}

async fn next_heartbeat(told: &mut mpsc::UnboundedReceiver<Told>) -> HeartbeatRequest {
    loop {
        if let Told::Heartbeat(request) = told.recv().await.unwrap() {
            return request;
        }
    }
}

#[tokio::test]
async fn a_worker_registers_beats_and_registers_again_with_one_that_forgot_it() {
    let shutdown = Shutdown::new();
    let (base, book, mut told) = coordinator("127.0.0.1:0", &shutdown).await;
    let mut config = config();
    config.id = Some("w1".to_owned());
    config.coordinators = vec![base];
    config.kv_blocks = 100;
    config.weight = 2.0;
    let worker = start_with(config).await;
    let first = next_registration(&mut told).await;
    assert_eq!(first.worker.id, "w1");
    assert_eq!(first.worker.address, format!("http://{}", worker.running.address()));
    assert_eq!((first.worker.capacity_tokens, first.worker.weight), (1600, 2.0));
    assert_eq!(first.worker.model, "kvik-tiny");
    assert_eq!(next_heartbeat(&mut told).await.epoch, first.worker.epoch);
    // As after a restart: no member is known.
    book.lock().members.clear();
    let again = next_registration(&mut told).await;
    assert_eq!(again.worker, first.worker);
    let load = next_heartbeat(&mut told).await.load;
    assert_eq!((load.running, load.outstanding_tokens), (0, 0));
    worker.running.drain();
    worker.running.closed().await;
    assert!(book.lock().members.is_empty());
    worker.shutdown.finish().await;
    shutdown.finish().await;
}

#[tokio::test]
async fn a_coordinator_that_is_away_is_passed_over_and_found_when_it_returns() {
    let shutdown = Shutdown::new();
    let (gone_shutdown, (first_base, _, mut first_told)) = {
        let shutdown = Shutdown::new();
        let coordinator = coordinator("127.0.0.1:0", &shutdown).await;
        (shutdown, coordinator)
    };
    let mut config = config();
    config.coordinators = vec![first_base.clone()];
    config.coordinator_backoff_ms = 50;
    let worker = start_with(config).await;
    let epoch = next_registration(&mut first_told).await.worker.epoch;
    next_heartbeat(&mut first_told).await;
    gone_shutdown.finish().await;
    let address = first_base.strip_prefix("http://").unwrap();
    let (_, book, mut told) = coordinator(address, &shutdown).await;
    // The new one knows nothing: heartbeats lead to a registration of the same life.
    assert_eq!(next_registration(&mut told).await.worker.epoch, epoch);
    assert_eq!(book.lock().members.len(), 1);
    worker.end().await;
    shutdown.finish().await;
}

#[tokio::test]
async fn heartbeats_keep_to_the_interval_while_no_coordinator_leads_and_afterwards() {
    const INTERVAL: Duration = Duration::from_millis(100);
    let shutdown = Shutdown::new();
    let (base, book, mut told) = coordinator("127.0.0.1:0", &shutdown).await;
    book.lock().heartbeat_interval_ms = INTERVAL.as_millis() as u64;
    let mut config = config();
    config.coordinators = vec![base];
    // Pauses that doubled to the end would last for minutes.
    config.coordinator_backoff_ms = 600_000;
    let worker = start_with(config).await;
    next_heartbeat(&mut told).await;
    book.lock().leads = false;
    let refused = async {
        for _ in 0..12 {
            while told.recv().await.unwrap() != Told::Refused {}
        }
    };
    // A new leader forgets members after three intervals.
    tokio::time::timeout(200 * INTERVAL, refused).await.unwrap();
    book.lock().leads = true;
    next_heartbeat(&mut told).await;
    let start = Instant::now();
    for _ in 0..10 {
        next_heartbeat(&mut told).await;
    }
    // The first of them may follow a refused one.
    assert!(start.elapsed() >= 9 * INTERVAL, "10 heartbeats in {:?}", start.elapsed());
    worker.end().await;
    shutdown.finish().await;
}

#[tokio::test]
async fn the_coordinator_can_ask_a_worker_to_drain() {
    let shutdown = Shutdown::new();
    let (base, book, mut told) = coordinator("127.0.0.1:0", &shutdown).await;
    let mut config = config();
    // Nothing listens on the first port.
    config.coordinators = vec!["http://127.0.0.1:9".to_owned(), base];
    let worker = start_with(config).await;
    next_registration(&mut told).await;
    let body = json!({"prompt": "a", "max_tokens": 120, "ignore_eos": true, "stream": true});
    let mut stream = worker.client.stream("/v1/completions", &body).await;
    stream.next().await.unwrap();
    book.lock().asks_to_drain = true;
    let mut last = String::new();
    while let Some(event) = stream.next().await {
        last = event;
    }
    assert_eq!(last, "[DONE]");
    worker.running.closed().await;
    let mut has_left = false;
    while let Ok(message) = told.try_recv() {
        has_left |= matches!(message, Told::Deregister(_));
    }
    assert!(has_left);
    worker.shutdown.finish().await;
    shutdown.finish().await;
}
