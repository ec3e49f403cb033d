//! KV that leaves the engine and comes back from every tier.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use http::{Method, StatusCode};
use kvik_worker::{StoreConfig, WorkerConfig};
use serde_json::{Value, json};

use crate::support::{TestWorker, config, start_with};

/// Tokens of the prompts: two chunks and some.
const PROMPT_TOKENS: u32 = 600;

/// Blocks for one prompt of that length and its output, but not for two.
const KV_BLOCKS: usize = 39;

fn prompt(seed: u32) -> Vec<u32> {
    (0..PROMPT_TOKENS).map(|place| 10 + (place * 31 + seed * 977 + place * place % 97) % 2000).collect()
}

fn with_store(store: StoreConfig) -> WorkerConfig {
    WorkerConfig { kv_blocks: KV_BLOCKS, store, ..config() }
}

/// Memory, and lower tiers whose chunks are all loaded: how many the planner would compute instead depends on the machine's load.
fn ram() -> StoreConfig {
    StoreConfig { ram: "64MiB".to_owned(), planner: "load_all".to_owned(), ..StoreConfig::default() }
}

/// The output with the log probabilities of every token, and where the prompt's KV came from.
async fn complete(worker: &TestWorker, prompt: &[u32]) -> (Value, Value) {
    let body = json!({
        "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 5, "return_token_ids": true,
    });
    let answer = worker.client.ask("/v1/completions", &body).await;
    worker.client.wait_for_copies().await;
    let details = &answer["usage"]["prompt_tokens_details"];
    (answer["choices"].clone(), details["cached_tokens_by_tier"].clone())
}

/// What a worker without a store makes of a prompt.
async fn fresh(prompt: &[u32]) -> Value {
    let worker = start_with(WorkerConfig { kv_blocks: KV_BLOCKS, ..config() }).await;
    let (output, tiers) = complete(&worker, prompt).await;
    assert_eq!(tiers, Value::Null);
    worker.end().await;
    output
}

/// Fills the engine's blocks with another prompt, so that it has nothing of the first.
async fn displace(worker: &TestWorker) {
    complete(worker, &prompt(99)).await;
}

#[tokio::test]
async fn a_displaced_prompt_comes_back_from_ram_to_the_same_logits() {
    let expected = fresh(&prompt(1)).await;
    let worker = start_with(with_store(ram())).await;
    assert_eq!(complete(&worker, &prompt(1)).await, (expected.clone(), Value::Null));
    displace(&worker).await;
    assert_eq!(complete(&worker, &prompt(1)).await, (expected.clone(), json!({"ram": 512})));
    let metrics = worker.client.get("/metrics").await.text();
    assert!(metrics.is_empty() || metrics.contains("kvik_worker_cached_tokens_total"), "{metrics}");
    worker.end().await;
}

#[tokio::test]
async fn tokens_that_the_engine_still_has_are_not_loaded() {
    let worker = start_with(with_store(ram())).await;
    complete(&worker, &prompt(1)).await;
    let (_, tiers) = complete(&worker, &prompt(1)).await;
    assert_eq!(tiers, json!({"engine": 592}));
    worker.end().await;
}

#[tokio::test]
async fn a_restarted_worker_finds_its_disk_warm() {
    let folder = tempfile::tempdir().unwrap();
    let expected = fresh(&prompt(2)).await;
    for is_layerwise in [false, true] {
        let nvme = Some(format!("{}:256MiB", folder.path().display()));
        let store = StoreConfig { nvme, layerwise: is_layerwise, ..ram() };
        let worker = start_with(with_store(store.clone())).await;
        complete(&worker, &prompt(2)).await;
        worker.end().await;

        let worker = start_with(with_store(store)).await;
        let lookup = worker.client.ask("/cache/lookup", &json!({"token_ids": prompt(2)})).await;
        assert_eq!(lookup["tiers"], json!({"nvme": 512}));
        assert_eq!(complete(&worker, &prompt(2)).await, (expected.clone(), json!({"nvme": 512})));
        worker.end().await;
    }
}

#[tokio::test]
async fn workers_share_a_remote_tier() {
    let folder = tempfile::tempdir().unwrap();
    let redis = Redis::start(folder.path());
    let expected = fresh(&prompt(3)).await;
    for (url, tier) in
        [(redis.url(), "redis"), (format!("file://{}", folder.path().join("objects").display()), "object")]
    {
        std::fs::create_dir_all(folder.path().join("objects")).unwrap();
        let store = StoreConfig { remote: Some(url.into()), ..ram() };
        let first = start_with(with_store(store.clone())).await;
        complete(&first, &prompt(3)).await;
        first.end().await;

        let second = start_with(with_store(store)).await;
        assert_eq!(complete(&second, &prompt(3)).await, (expected.clone(), json!({tier: 512})));
        second.end().await;
    }
}

#[tokio::test]
async fn another_tenant_finds_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = Some(format!("{}:256MiB", folder.path().display()));
    let store = StoreConfig { nvme, tenant: "a".to_owned(), ..ram() };
    let worker = start_with(with_store(store.clone())).await;
    complete(&worker, &prompt(4)).await;
    worker.end().await;
    let worker = start_with(with_store(StoreConfig { tenant: "b".to_owned(), ..store })).await;
    assert_eq!(complete(&worker, &prompt(4)).await.1, Value::Null);
    worker.end().await;
}

#[tokio::test]
async fn a_worker_with_another_digest_key_takes_no_chunk() {
    let folder = tempfile::tempdir().unwrap();
    let key_file = |name: &str, secret: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, secret).unwrap();
        Some(path)
    };
    let nvme = Some(format!("{}:256MiB", folder.path().join("disk").display()));
    let store = StoreConfig { nvme, digest_key_file: key_file("a", "the first of two secrets\n"), ..ram() };
    let expected = fresh(&prompt(8)).await;
    let worker = start_with(with_store(store.clone())).await;
    complete(&worker, &prompt(8)).await;
    let exported =
        worker.client.post("/cache/retrieve", &json!({"token_ids": prompt(8)})).await.body.to_vec();
    worker.end().await;

    // The same secret without the end of its line.
    let same = StoreConfig { digest_key_file: key_file("b", "the first of two secrets"), ..store.clone() };
    let worker = start_with(with_store(same)).await;
    assert_eq!(complete(&worker, &prompt(8)).await, (expected.clone(), json!({"nvme": 512})));
    let stats = worker.client.get("/cache/stats").await.json();
    let nvme = stats["tiers"].as_array().unwrap().iter().find(|tier| tier["tier"] == "nvme").unwrap();
    let get = nvme["operations"].as_array().unwrap().iter().find(|one| one["operation"] == "get").unwrap();
    assert_eq!(
        (&get["outcomes"]["hit"], &get["outcomes"]["token_mismatch"]),
        (&json!(2), &json!(0)),
        "{get}"
    );
    assert!(get["bytes"].as_u64().unwrap() > 0 && get["calls"].as_u64().unwrap() > 0, "{get}");
    worker.end().await;

    let other = StoreConfig { digest_key_file: key_file("c", "the second of the secrets"), ..store.clone() };
    let worker = start_with(with_store(other)).await;
    assert_eq!(complete(&worker, &prompt(8)).await, (expected, Value::Null));
    let stats = worker.client.get("/cache/stats").await.json();
    assert_eq!(stats["counts"]["token_mismatches_nvme"], 0, "names differ with the key: {stats}");
    let refused = worker.client.send(Method::POST, "/cache/store", exported).await;
    assert_eq!((refused.status, refused.error().1), (StatusCode::BAD_REQUEST, json!("token_digest")));
    worker.end().await;

    let short = StoreConfig { digest_key_file: key_file("d", "short"), ..store };
    let shutdown = kvik_runtime::shutdown::Shutdown::new();
    let error = kvik_worker::Worker::start(with_store(short), &shutdown).await.unwrap_err().to_string();
    assert!(error.contains("`store.digest_key_file`") && error.contains("16 or more"), "{error}");
    shutdown.finish().await;
}

#[tokio::test]
async fn a_remote_tier_that_is_gone_costs_hits_and_no_request() {
    let folder = tempfile::tempdir().unwrap();
    let redis = Redis::start(folder.path());
    let store = StoreConfig {
        remote: Some(redis.url().into()),
        remote_timeout_ms: 300,
        load_timeout_ms: 500,
        ..ram()
    };
    let expected = fresh(&prompt(5)).await;
    let worker = start_with(with_store(store)).await;
    complete(&worker, &prompt(5)).await;
    drop(redis);
    worker.client.ask("/cache/clear", &json!({"tiers": ["ram"]})).await;
    displace(&worker).await;
    for _ in 0..3 {
        assert_eq!(complete(&worker, &prompt(5)).await.0, expected);
        displace(&worker).await;
    }
    worker.end().await;
}

#[tokio::test]
async fn the_admin_api_looks_pins_moves_exports_and_clears() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = Some(format!("{}:256MiB", folder.path().display()));
    let worker = start_with(with_store(StoreConfig { nvme, ..ram() })).await;
    let client = &worker.client;
    let tokens = json!({"token_ids": prompt(6)});
    let nothing = client.ask("/cache/lookup", &tokens).await;
    assert_eq!(nothing, json!({"prompt_tokens": 600, "cached_tokens": 0, "tiers": {}, "chunk_tokens": 256}));
    let (expected, _) = complete(&worker, &prompt(6)).await;
    assert_eq!(client.ask("/cache/lookup", &tokens).await["tiers"], json!({"ram": 512}));
    assert_eq!(client.ask("/cache/pin", &tokens).await["tokens"], 512);
    assert_eq!(client.ask("/cache/unpin", &tokens).await["tokens"], 512);
    let refused = client.post("/cache/unpin", &tokens).await;
    assert_eq!(refused.status, StatusCode::CONFLICT, "{}", refused.text());

    let mut relocation = json!({"token_ids": prompt(6), "from": "ram", "to": "nvme"});
    assert_eq!(client.ask("/cache/move", &relocation).await["chunks"], 2);
    assert_eq!(client.ask("/cache/lookup", &tokens).await["tiers"], json!({"nvme": 512}));
    relocation["to"] = "redis".into();
    let (message, field, _) = client.post("/cache/move", &relocation).await.error();
    assert_eq!((message.as_str(), field), ("`to` is redis; allowed: ram, nvme", json!("to")));

    let begun = client.ask("/cache/prefetch", &tokens).await;
    let path = format!("/cache/prefetch/{}", begun["id"].as_str().unwrap());
    let done = loop {
        let status = client.get(&path).await.json();
        if status["state"] != "loading" {
            break status;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!((&done["state"], &done["loaded_tokens"]), (&json!("done"), &json!(512)));
    assert_eq!(client.send(Method::DELETE, "/cache/prefetch/77", vec![]).await.status, StatusCode::NOT_FOUND);

    let exported = client.post("/cache/retrieve", &tokens).await;
    assert_eq!(exported.status, StatusCode::OK);
    let cleared = client.ask("/cache/clear", &tokens).await;
    assert_eq!(cleared["chunks"], json!({"ram": 2, "nvme": 2}));
    assert_eq!(client.ask("/cache/lookup", &tokens).await["cached_tokens"], 0);
    let stored = client.send(Method::POST, "/cache/store", exported.body.to_vec()).await;
    assert_eq!(stored.json(), json!({"stored_chunks": 2, "present_chunks": 0}));
    displace(&worker).await;
    assert_eq!(complete(&worker, &prompt(6)).await, (expected, json!({"ram": 512})));

    let health = client.get("/cache/health").await.json();
    assert_eq!(health["status"], "ok");
    let stats = client.get("/cache/stats").await.json();
    assert!(stats["counts"]["hit_tokens_ram"].as_u64().unwrap() >= 512, "{stats}");
    worker.end().await;
}

#[tokio::test]
async fn a_prefetch_that_no_client_asks_about_gives_its_memory_back() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = Some(format!("{}:256MiB", folder.path().display()));
    let store = StoreConfig { nvme, ram: "8MiB".to_owned(), ..ram() };
    let worker = start_with(with_store(store)).await;
    let client = &worker.client;
    // Exported while memory has room: once prompts displace each other, a slow disk costs some of their chunks.
    complete(&worker, &prompt(21)).await;
    let last = json!({"token_ids": prompt(21)});
    let exported = client.post("/cache/retrieve", &last).await.body.to_vec();
    client.ask("/cache/clear", &last).await;
    // More prompts than fit into memory: the first ones are on the disk alone.
    for seed in 10..21 {
        complete(&worker, &prompt(seed)).await;
    }
    for seed in 10..21 {
        client.ask("/cache/prefetch", &json!({"token_ids": prompt(seed)})).await;
    }
    // As long as the prefetches hold memory, there is no room.
    let waited = tokio::time::timeout(std::time::Duration::from_secs(10), async {
        loop {
            let stored = client.send(Method::POST, "/cache/store", exported.clone()).await.json();
            if stored["stored_chunks"].as_u64().unwrap() + stored["present_chunks"].as_u64().unwrap() == 2 {
                return;
            }
            tokio::task::yield_now().await;
        }
    });
    waited.await.expect("finished prefetches hold no memory");
    worker.end().await;
}

#[tokio::test]
async fn kv_of_another_model_or_with_missing_layers_is_refused() {
    let worker = start_with(with_store(ram())).await;
    let client = &worker.client;
    complete(&worker, &prompt(7)).await;
    let tokens = json!({"token_ids": prompt(7)});
    let one_layer = client.post("/cache/retrieve?layer=0", &tokens).await;
    let refused = client.send(Method::POST, "/cache/store", one_layer.body.to_vec()).await;
    assert_eq!(refused.error().1, "chunk.0.layer.1");
    let exported = client.post("/cache/retrieve", &tokens).await.body.to_vec();
    worker.end().await;

    let other = StoreConfig { tenant: "other".to_owned(), ..ram() };
    let worker = start_with(with_store(other)).await;
    let refused = worker.client.send(Method::POST, "/cache/store", exported).await;
    assert_eq!((refused.status, refused.error().1), (StatusCode::BAD_REQUEST, json!("namespace")));
    let refused = worker.client.send(Method::POST, "/cache/store", b"nonsense".to_vec()).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    worker.end().await;
}

#[tokio::test]
async fn without_a_store_the_admin_api_says_so() {
    let worker = start_with(config()).await;
    assert_eq!(worker.client.get("/cache/health").await.json(), json!({"status": "off", "tiers": []}));
    let refused = worker.client.post("/cache/lookup", &json!({"token_ids": [1, 2]})).await;
    assert_eq!(refused.status, StatusCode::NOT_FOUND);
    assert!(refused.error().0.contains("no KV store"), "{}", refused.text());
    worker.end().await;
}

#[tokio::test]
async fn a_disk_that_cannot_be_used_is_an_error_of_the_start() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let store = StoreConfig { nvme: Some(format!("{}:1GiB", file.path().display())), ..ram() };
    let shutdown = kvik_runtime::shutdown::Shutdown::new();
    let error = kvik_worker::Worker::start(with_store(store), &shutdown).await.unwrap_err();
    assert!(error.to_string().contains("open the KV store"), "{error}");
    shutdown.finish().await;
}

/// A redis-server on a unix socket that ends with the test.
struct Redis {
    process: Child,
    socket: std::path::PathBuf,
}

impl Redis {
    fn start(folder: &Path) -> Self {
        let socket = folder.join("redis.sock");
        let process = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(&socket)
            .arg("--dir")
            .arg(folder)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed (Debian: apt-get install redis-server)");
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            std::thread::yield_now();
        }
        Self { process, socket }
    }

    fn url(&self) -> String {
        format!("unix://{}", self.socket.display())
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}
