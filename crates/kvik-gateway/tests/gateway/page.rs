//! The web page: its files, its stream of events and what it may do.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use kvik_gateway::{ApiKeyConfig, GatewayConfig};
use kvik_proto::sse::SseDecoder;
use serde_json::{Value, json};

use crate::coordinator::{MockCoordinator, snapshot};
use crate::mock::{Behavior, MockWorker};
use crate::support::{TestGateway, Whole, whole};

/// Far above what an event takes.
const DEADLINE: Duration = Duration::from_secs(30);
/// `printf %s secret | sha256sum`
const SECRET: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

async fn ask(
    gateway: &TestGateway,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
) -> Response<Incoming> {
    let mut request = Request::builder().method(method).uri(gateway.url(path));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(Bytes::from_static(b"{}"))).unwrap();
    tokio::time::timeout(DEADLINE, gateway.http.request(request)).await.expect("an answer in time").unwrap()
}

async fn get(gateway: &TestGateway, path: &str, headers: &[(&str, &str)]) -> Whole {
    whole(ask(gateway, "GET", path, headers).await).await
}

/// A stream of events.
struct Events {
    body: Incoming,
    decoder: SseDecoder,
}

impl Events {
    async fn open(gateway: &TestGateway) -> Self {
        let response = ask(gateway, "GET", "/ui/events", &[]).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        assert_eq!(response.headers()["cache-control"], "no-store");
        Self { body: response.into_body(), decoder: SseDecoder::default() }
    }

    /// The next event; none at the end.
    async fn next(&mut self) -> Option<Value> {
        loop {
            let frame = tokio::time::timeout(DEADLINE, self.body.frame()).await.expect("an event in time")?;
            let mut event = None;
            let data = frame.unwrap().into_data().unwrap();
            self.decoder.push(&data, |text| event = Some(serde_json::from_str(text).unwrap())).unwrap();
            if event.is_some() {
                return event;
            }
        }
    }

    /// Waits for an event whose first worker is as `is_wanted` says.
    async fn worker(&mut self, is_wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            let event = self.next().await.expect("the stream goes on");
            let worker = &event["fleet"]["workers"][0];
            if is_wanted(worker) {
                return worker.clone();
            }
        }
    }
}

#[tokio::test]
async fn the_files_of_the_page_are_served_to_everyone_under_a_strict_policy() {
    let worker = MockWorker::start("m").await;
    let key = ApiKeyConfig { name: "me".to_owned(), sha256: SECRET.into() };
    let gateway = TestGateway::before(&[&worker], |config| config.api_keys.push(key)).await;
    for (path, kind) in [
        ("/ui/", "text/html; charset=utf-8"),
        ("/ui/app.js", "text/javascript; charset=utf-8"),
        ("/ui/style.css", "text/css; charset=utf-8"),
        ("/ui/icon.svg", "image/svg+xml"),
    ] {
        let answer = get(&gateway, path, &[]).await;
        assert_eq!((answer.status.as_u16(), answer.headers["content-type"].to_str().unwrap()), (200, kind));
        let policy = answer.headers["content-security-policy"].to_str().unwrap();
        for rule in ["default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"]
        {
            assert!(policy.contains(rule), "{policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(answer.headers["x-content-type-options"], "nosniff");
        let tag = answer.headers["etag"].to_str().unwrap().to_owned();
        let again = get(&gateway, path, &[("if-none-match", &tag)]).await;
        assert_eq!((again.status.as_u16(), again.body.len()), (304, 0));
    }
    for missing in ["/ui/nothing.js", "/ui/..%2fCargo.toml", "/ui/assets.rs"] {
        get(&gateway, missing, &[]).await.assert_error(404, None);
    }
}

#[tokio::test]
async fn browsers_are_led_to_the_page_and_programs_are_not() {
    let gateway = TestGateway::start(GatewayConfig::default()).await;
    let browser = get(&gateway, "/", &[("accept", "text/html,application/xhtml+xml")]).await;
    assert_eq!((browser.status.as_u16(), &browser.headers["location"]), (307, &"ui/".parse().unwrap()));
    assert_eq!(get(&gateway, "/ui", &[]).await.status, 307);
    get(&gateway, "/", &[]).await.assert_error(404, None);
    let mut config = GatewayConfig::default();
    config.ui.enabled = false;
    let gateway = TestGateway::start(config).await;
    for path in ["/ui/", "/ui/events", "/ui/workers/a/sequences"] {
        get(&gateway, path, &[]).await.assert_error(404, None);
    }
}

#[tokio::test]
async fn a_page_sees_what_workers_do_as_their_metrics_say() {
    let worker = MockWorker::start("m").await;
    let metrics = |prompt: u32, cached: u32| {
        format!(
            "vllm:num_requests_running{{engine=\"0\"}} 2\nvllm:prompt_tokens_total{{engine=\"0\"}} {prompt}\n\
             kvik_worker_cached_tokens_total{{engine=\"0\",tier=\"ram\"}} {cached}\n\
             kvik_store_tier_up{{tier=\"ram\"}} 1\nkvik_store_tier_used_bytes{{tier=\"ram\"}} 4096\n"
        )
    };
    *worker.state.metrics.lock() = metrics(100, 0);
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    let mut events = Events::open(&gateway).await;
    let first = events.worker(|worker| worker["totals"]["prompt_tokens"] == 100.0).await;
    assert_eq!((&first["id"], &first["models"]), (&json!(worker.url()), &json!(["m"])));
    assert_eq!((&first["state"], &first["gauges"]["running"]), (&json!("ready"), &json!(2.0)));
    assert_eq!(first["gauges"]["tiers"]["ram"]["used_bytes"], 4096.0);
    *worker.state.metrics.lock() = metrics(400, 200);
    let later = events.worker(|worker| worker["totals"]["prompt_tokens"] == 400.0).await;
    let rate = |value: &Value| value.as_f64().unwrap();
    let (prompt, cached) =
        (rate(&later["rates"]["prompt_tokens"]), rate(&later["rates"]["cached_tokens"]["ram"]));
    assert!(0.0 < cached && (cached / prompt - 200.0 / 300.0).abs() < 1e-6, "{later}");
}

#[tokio::test]
async fn a_worker_that_dies_is_seen_and_the_stream_ends_when_the_gateway_drains() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    let mut events = Events::open(&gateway).await;
    events.worker(|worker| worker["state"] == "ready").await;
    drop(worker);
    events.worker(|worker| worker["state"] == "silent" || worker["state"] == "down").await;
    gateway.shutdown.drain();
    while events.next().await.is_some() {}
    gateway.running.finished().await;
}

#[tokio::test]
async fn the_stream_needs_a_key_where_there_are_keys_and_pages_are_bounded() {
    let worker = MockWorker::start("m").await;
    let key = ApiKeyConfig { name: "me".to_owned(), sha256: SECRET.into() };
    let gateway = TestGateway::before(&[&worker], |config| config.api_keys.push(key)).await;
    get(&gateway, "/ui/events", &[]).await.assert_error(401, Some("invalid_api_key"));
    let answer = ask(&gateway, "GET", "/ui/events", &[("authorization", "Bearer secret")]).await;
    assert_eq!(answer.status(), 200);
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    let mut open = Vec::new();
    for _ in 0..64 {
        open.push(Events::open(&gateway).await);
    }
    get(&gateway, "/ui/events", &[]).await.assert_error(503, None);
    drop(open);
    crate::support::until("there is room again", async || {
        ask(&gateway, "GET", "/ui/events", &[]).await.status() == 200
    })
    .await;
}

#[tokio::test]
async fn a_change_goes_to_the_worker_with_the_operators_token_and_never_for_another_site() {
    const TOKEN: &str = "the-token-of-this-cluster";
    let (worker, other) = (MockWorker::start("m").await, MockWorker::start("m").await);
    worker.behave(Behavior::answer(202, r#"{"status":"draining"}"#));
    let coordinator = MockCoordinator::start("127.0.0.1:0", snapshot(1, 1, &[&worker, &other])).await;
    let mut config = GatewayConfig::default();
    config.coordinators.push(format!("http://{}", coordinator.address));
    config.cluster_token = Some(TOKEN.into());
    let gateway = TestGateway::start(config).await;
    gateway.wait_until_usable(2).await;
    let id = |worker: &MockWorker| format!("worker-{}", worker.address.port());
    let path = format!("/ui/workers/{}/drain", id(&worker));
    let token = ("x-kvik-cluster-token", TOKEN);

    gateway.post(&path, &[], "{}").await.assert_error(401, Some("invalid_token"));
    let foreign = gateway.post(&path, &[token, ("sec-fetch-site", "cross-site")], "{}").await;
    assert_eq!(foreign.status, 403);
    assert_eq!(worker.n_seen(), 0);

    let drained = gateway.post(&path, &[token], r#"{"deadline_s":5}"#).await;
    assert_eq!((drained.status.as_u16(), drained.json()), (202, json!({"status": "draining"})));
    let seen = worker.state.seen.lock()[0].clone();
    assert_eq!((seen.path.as_str(), &seen.body[..]), ("/drain", &br#"{"deadline_s":5}"#[..]));
    assert_eq!(seen.headers["x-kvik-cluster-token"], TOKEN);

    let moved = format!("/ui/workers/{}/sequences/seq-1/move", id(&worker));
    gateway.post(&moved, &[token], &json!({"to": id(&other)}).to_string()).await;
    let seen = worker.state.seen.lock()[1].clone();
    assert_eq!(seen.path, "/sequences/seq-1/move");
    assert_eq!(serde_json::from_slice::<Value>(&seen.body).unwrap(), json!({"to": other.url()}));

    for (path, body, status) in [
        (format!("/ui/workers/{}/sequences/seq-1/move", id(&worker)), json!({"to": id(&worker)}), 400),
        (format!("/ui/workers/{}/sequences/..%2Fdrain/move", id(&worker)), json!({"to": id(&other)}), 400),
        ("/ui/workers/unknown/drain".to_owned(), json!({}), 404),
        (format!("/ui/workers/{}/cache/retrieve", id(&worker)), json!({}), 404),
        (format!("/ui/workers/{}/kv/put", id(&worker)), json!({}), 404),
    ] {
        let answer = gateway.post(&path, &[token], &body.to_string()).await;
        assert_eq!(answer.status.as_u16(), status, "{path}: {:?}", answer.body);
    }
    assert_eq!(worker.n_seen(), 2);
    coordinator.stop().await;
}
