//! All workers of a service restarted in turn, under a load that does not stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use kvik_proto::client::HttpClient;
use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::fleet::Fleet;
use super::request::Request;
use crate::stream::Stream;

/// Workers of the service.
pub(super) const N_WORKERS: u32 = 3;
/// Requests at a time.
pub(super) const N_CLIENTS: u64 = 8;
/// Requests that differ; each is sent again and again.
const N_REQUESTS: u64 = 24;
/// Time between two restarts.
const PAUSE: Duration = Duration::from_secs(1);

/// What rolling restarts gave.
#[derive(Debug)]
pub(super) struct Rolled {
    pub(super) n_restarts: usize,
    pub(super) n_served: usize,
    /// What each failed request said.
    pub(super) failures: Vec<String>,
}

/// Restarts all workers in turn until `duration` is over, each at least once.
///
/// # Errors
/// If a text is not that of the first answer to the same request, or a worker cannot be restarted.
pub(super) async fn rolling(fleet: &mut Fleet, duration: Duration) -> anyhow::Result<Rolled> {
    let mut expected = Vec::new();
    for number in 0..N_REQUESTS {
        let stream = open(&fleet.http, &fleet.gateway, number, "first").await?;
        expected.push(stream.finish().await.context("run a stream undisturbed")?.text);
    }
    let load = Arc::new(Load {
        http: fleet.http.clone(),
        gateway: fleet.gateway.clone(),
        expected,
        is_over: AtomicBool::new(false),
        n_served: AtomicUsize::new(0),
        failures: Mutex::default(),
    });
    let mut clients = JoinSet::new();
    for client in 0..N_CLIENTS {
        clients.spawn(Arc::clone(&load).run(client));
    }
    let restarted = restart_all(fleet, duration).await;
    // Relaxed: the clients are joined below.
    load.is_over.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended.context("run a client")??;
    }
    Ok(Rolled {
        n_restarts: restarted?,
        n_served: load.n_served.load(Ordering::Relaxed),
        failures: std::mem::take(&mut *load.failures.lock()),
    })
}

async fn restart_all(fleet: &mut Fleet, duration: Duration) -> anyhow::Result<usize> {
    let begin = Instant::now();
    let mut n_restarts = 0;
    while begin.elapsed() < duration || n_restarts < fleet.numbers().len() {
        let numbers = fleet.numbers();
        let number = numbers[n_restarts % numbers.len()];
        fleet.drain_worker(number).await?;
        fleet.start_worker(number).await?;
        n_restarts += 1;
        tokio::time::sleep(PAUSE).await;
    }
    Ok(n_restarts)
}

struct Load {
    http: HttpClient,
    gateway: String,
    /// The text of each request.
    expected: Vec<String>,
    is_over: AtomicBool,
    n_served: AtomicUsize,
    failures: Mutex<Vec<String>>,
}

impl Load {
    async fn run(self: Arc<Self>, client: u64) -> anyhow::Result<()> {
        let mut number = client;
        while !self.is_over.load(Ordering::Relaxed) {
            let request = number % N_REQUESTS;
            let name = format!("client-{client}-{number}");
            let answer = async { open(&self.http, &self.gateway, request, &name).await?.finish().await };
            match answer.await {
                Ok(recorded) => {
                    ensure!(
                        self.expected.get(request as usize) == Some(&recorded.text),
                        "the text of request {request} is not that of its first answer"
                    );
                    self.n_served.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => {
                    self.failures.lock().push(format!("request {name} of rolling restarts: {error:#}"));
                }
            }
            number += N_CLIENTS;
        }
        Ok(())
    }
}

async fn open(http: &HttpClient, gateway: &str, number: u64, name: &str) -> anyhow::Result<Stream> {
    let request = Request {
        number,
        prompt_tokens: 32 + 16 * number as usize,
        output_tokens: 64 + 8 * number as usize,
        is_sampled: number % 2 == 1,
    };
    Stream::open(http, gateway, &request.body(name, name)).await
}
