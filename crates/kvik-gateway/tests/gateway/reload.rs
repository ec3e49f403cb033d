//! Configuration that changes while requests run.

use kvik_gateway::ApiKeyConfig;

use crate::mock::{Behavior, MockWorker};
use crate::support::{TestGateway, config_for, until};

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;
/// `printf %s secret | sha256sum`
const SECRET: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

#[tokio::test]
async fn a_reload_swaps_keys_and_tells_the_difference() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    assert_eq!(gateway.complete(BODY).await.status, 200);
    let mut config = config_for(&[&worker]);
    config.listen = "127.0.0.1:0".to_owned();
    config.retry.max_attempts = 3;
    config.api_keys.push(ApiKeyConfig { name: "me".to_owned(), sha256: SECRET.into() });
    let changes = gateway.gateway().reload(config.clone()).unwrap();
    let fields: Vec<&str> = changes.iter().map(|change| change.field.as_str()).collect();
    assert_eq!(fields, ["api_keys", "retry.max_attempts"]);
    assert!(!format!("{changes:?}").contains(SECRET));
    gateway.complete(BODY).await.assert_error(401, Some("invalid_api_key"));
    assert_eq!(
        gateway.post("/v1/completions", &[("authorization", "Bearer secret")], BODY).await.status,
        200
    );
    assert_eq!(gateway.gateway().reload(config).unwrap(), []);
}

#[tokio::test]
async fn an_invalid_configuration_changes_nothing() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    let mut config = config_for(&[]);
    config.retry.max_attempts = 0;
    let message = gateway.gateway().reload(config).unwrap_err().to_string();
    assert_eq!(message, "`retry.max_attempts` is 0; allowed: 1 to 10");
    assert_eq!(gateway.complete(BODY).await.status, 200);
}

#[tokio::test]
async fn a_reload_cannot_take_the_keys_away_that_let_a_gateway_listen() {
    let mut config = config_for(&[]);
    config.api_keys.push(ApiKeyConfig { name: "me".to_owned(), sha256: SECRET.into() });
    let gateway = TestGateway::start_at("0.0.0.0:0", config.clone()).await;
    config.api_keys.clear();
    let message = gateway.gateway().reload(config.clone()).unwrap_err().to_string();
    assert!(message.contains("`listen` is 0.0.0.0:"), "{message}");
    let local = TestGateway::start(config.clone()).await;
    local.gateway().reload(config).unwrap();
}

#[tokio::test]
async fn loads_and_breakers_live_through_a_reload() {
    let (left, right) = (MockWorker::start("m").await, MockWorker::start("m").await);
    let gateway = TestGateway::before(&[&left], |_| {}).await;
    left.behave(Behavior::StreamAndHang(Behavior::stream(&["data: 1\n\n"])));
    let running = gateway.open("/v1/completions", &[], BODY).await;
    let n_tokens = gateway.outstanding_tokens();
    assert!(0 < n_tokens);
    gateway.gateway().reload(config_for(&[&left, &right])).unwrap();
    gateway.wait_until_usable(2).await;
    assert_eq!(gateway.outstanding_tokens(), n_tokens);
    drop(running);
    until("the load is back", async || gateway.outstanding_tokens() == 0).await;
    gateway.gateway().reload(config_for(&[&right])).unwrap();
    assert_eq!(gateway.complete(BODY).await.worker(), right.url());
}

#[tokio::test]
async fn a_file_that_changes_is_reloaded() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvik.yaml");
    std::fs::write(&file, "1").unwrap();
    let base = config_for(&[&worker]);
    let source = file.clone();
    gateway.gateway().reload_on_change(Some(file.clone()), move || {
        let mut config = base.clone();
        config.max_body_bytes =
            std::fs::read_to_string(&source)?.trim().parse().map_err(std::io::Error::other)?;
        Ok::<_, std::io::Error>(config)
    });
    // Written again until it counts: the watcher may not have seen the first state yet, and a
    // file's time is coarse.
    until("the limit counts", async || {
        std::fs::write(&file, "10").unwrap();
        gateway.complete(BODY).await.status == 413
    })
    .await;
    until("a broken file changes nothing", async || {
        std::fs::write(&file, "x").unwrap();
        gateway.complete(BODY).await.status == 413
    })
    .await;
}

#[tokio::test]
async fn the_metrics_of_a_worker_that_left_disappear() {
    let (left, right) = (MockWorker::start("m").await, MockWorker::start("m").await);
    let gateway = TestGateway::before(&[&left, &right], |config| {
        config.health.timeout_ms = 1000;
        config.health.failures = 1;
    })
    .await;
    left.state.is_healthy.store(false, std::sync::atomic::Ordering::SeqCst);
    gateway.wait_for_breaker(&left, "open").await;
    let scrape = async || String::from_utf8(gateway.get("/metrics").await.body.to_vec()).unwrap();
    let series = |worker: &MockWorker| format!(r#"kvik_gateway_breaker_state{{worker="{}"}} "#, worker.url());
    let before = scrape().await;
    assert!(before.contains(&format!("{}2\n", series(&left))), "{before}");
    assert!(before.contains(&format!("{}0\n", series(&right))), "{before}");
    gateway.gateway().reload(config_for(&[&right])).unwrap();
    let after = scrape().await;
    assert!(!after.contains(&left.url()), "{after}");
    assert!(after.contains(&format!("{}0\n", series(&right))), "{after}");
    assert!(after.contains(&format!(r#"kvik_gateway_outstanding_tokens{{worker="{}"}} 0"#, right.url())));
}
