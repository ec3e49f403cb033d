//! Models whose engines another part of the process starts and stops.

use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use axum::routing::get;
use bytes::Bytes;
use http_body_util::BodyExt as _;
use kvik_gateway::{Management, ModelUse, NotReady, Readiness};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::mock::{Behavior, MockWorker};
use crate::support::{TestGateway, config_for, until, whole};

/// A manager that lets requests in when it is told to.
#[derive(Debug, Default)]
struct Manager {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    is_ready: bool,
    refusal: Option<NotReady>,
    n_waiting: usize,
    n_entered: usize,
    ended: Vec<bool>,
}

#[derive(Debug)]
struct Managed(Arc<Manager>);

#[derive(Debug)]
struct Use {
    manager: Arc<Manager>,
    has_entered: bool,
}

impl Readiness for Managed {
    fn begin(&self, model: &str) -> Option<Box<dyn ModelUse>> {
        if model != "m" {
            return None;
        }
        self.0.state.lock().n_waiting += 1;
        Some(Box::new(Use { manager: Arc::clone(&self.0), has_entered: false }))
    }
}

impl ModelUse for Use {
    fn try_enter(&mut self) -> bool {
        let mut state = self.manager.state.lock();
        if state.is_ready {
            state.n_waiting -= 1;
            state.n_entered += 1;
            self.has_entered = true;
        }
        self.has_entered
    }

    fn enter(&mut self) -> Pin<Box<dyn Future<Output = Result<(), NotReady>> + Send + '_>> {
        Box::pin(async move {
            let manager = Arc::clone(&self.manager);
            loop {
                let mut changed = std::pin::pin!(manager.changed.notified());
                changed.as_mut().enable();
                if self.try_enter() {
                    return Ok(());
                }
                if let Some(refusal) = manager.state.lock().refusal.clone() {
                    return Err(refusal);
                }
                changed.await;
            }
        })
    }

    fn end(&mut self, is_success: bool) {
        self.manager.state.lock().ended.push(is_success);
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut state = self.manager.state.lock();
        if self.has_entered {
            state.n_entered -= 1;
        } else {
            state.n_waiting -= 1;
        }
    }
}

impl Manager {
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
        self.changed.notify_waiters();
    }

    fn counts(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.n_waiting, state.n_entered)
    }
}

async fn start(manager: &Arc<Manager>) -> TestGateway {
    let management = Management {
        readiness: Arc::new(Managed(Arc::clone(manager))),
        models: vec!["m".to_owned()],
        routes: Router::new().route("/more", get(async || "more")),
        admin_routes: Router::new().route("/most", get(async || "most")),
    };
    TestGateway::start_managed(config_for(&[]), management).await
}

const BODY: &str = r#"{"model":"m","prompt":"x"}"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_model_without_a_backend_is_listed_and_its_requests_wait() {
    let (manager, worker) = (Arc::new(Manager::default()), MockWorker::start("m").await);
    let gateway = start(&manager).await;
    assert_eq!(gateway.get("/v1/models").await.json()["data"][0]["id"], "m");
    assert_eq!(gateway.get("/v1/models/m").await.status, 200);
    assert_eq!(gateway.get("/ready").await.status, 200);
    assert_eq!(gateway.get("/more").await.body, "more");
    assert_eq!(gateway.get("/most").await.body, "most");
    let asking = async {
        let asked = tokio::join!(gateway.complete(BODY), gateway.complete(BODY));
        assert_eq!((asked.0.status.as_u16(), asked.1.status.as_u16()), (200, 200));
    };
    let waking = async {
        until("both wait", async || manager.counts() == (2, 0)).await;
        assert!(worker.state.seen.lock().is_empty());
        gateway.gateway().manage("m", Some(&worker.url()));
        manager.change(|state| state.is_ready = true);
    };
    tokio::join!(asking, waking);
    assert_eq!(manager.counts(), (0, 0));
    assert_eq!(manager.state.lock().ended, [true, true]);
    // A model that is managed no more is unknown.
    gateway.gateway().unmanage("m");
    let nothing = gateway.complete(BODY).await;
    assert!(matches!(nothing.status.as_u16(), 404 | 503), "{nothing:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_use_lasts_to_the_last_byte_of_the_answer() {
    let (manager, worker) = (Arc::new(Manager::default()), MockWorker::start("m").await);
    let gateway = start(&manager).await;
    gateway.gateway().manage("m", Some(&worker.url()));
    manager.change(|state| state.is_ready = true);
    *worker.state.behavior.lock() = Behavior::StreamAndHang(vec![Bytes::from_static(b"data: {}\n\n")]);
    let mut stream =
        gateway.open("/v1/completions", &[], r#"{"model":"m","prompt":"x","stream":true}"#).await;
    assert!(stream.frame().await.is_some());
    assert_eq!(manager.counts(), (0, 1));
    // A client that leaves ends it.
    drop(stream);
    until("the use has ended", async || manager.counts() == (0, 0)).await;
    assert_eq!(manager.state.lock().ended, [false]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_not_let_in_says_why_and_when_to_try_again() {
    let manager = Arc::new(Manager::default());
    let gateway = start(&manager).await;
    let refusal = NotReady { message: "no weights".to_owned(), retry_after_s: 7, is_full: false };
    manager.change(|state| state.refusal = Some(refusal.clone()));
    let answer = gateway.complete(BODY).await;
    let error = answer.assert_error(503, None);
    assert_eq!(error["message"], "no weights");
    assert_eq!(answer.headers["retry-after"], "7");
    manager.change(|state| state.refusal = Some(NotReady { is_full: true, ..refusal }));
    assert_eq!(gateway.complete(BODY).await.status, 429);
    assert_eq!(manager.counts(), (0, 0));
    // One that waits longer than it may ends.
    manager.change(|state| state.refusal = None);
    let slow = gateway.open("/v1/completions", &[("x-request-timeout-ms", "50")], BODY).await;
    let slow = whole(slow).await;
    assert_eq!(slow.status, 504, "{slow:?}");
    assert_eq!(manager.counts(), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_that_comes_back_begins_with_a_closed_breaker() {
    let (manager, worker) = (Arc::new(Manager::default()), MockWorker::start("m").await);
    let gateway = start(&manager).await;
    manager.change(|state| state.is_ready = true);
    gateway.gateway().manage("m", Some("http://127.0.0.1:1"));
    until("the breaker opens", async || {
        gateway.complete(BODY).await;
        gateway.gateway().workers().iter().any(|status| status.breaker == "open")
    })
    .await;
    gateway.gateway().manage("m", None);
    assert!(gateway.gateway().workers().is_empty());
    gateway.gateway().manage("m", Some(&worker.url()));
    assert_eq!(gateway.breaker(&worker), "closed");
    assert_eq!(gateway.complete(BODY).await.status, 200);
}
