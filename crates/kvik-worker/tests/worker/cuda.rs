//! A worker on a GPU that reads its disk into the GPU's memory; needs a GPU, NVIDIA's cuFile and the feature `cuda-tests`.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use kvik_worker::{StoreConfig, Worker, WorkerConfig};
use serde_json::{Value, json};

use crate::support::{TestWorker, config, start_with};

/// A worker on the disk of `folder`.
fn config_of(folder: &Path, planner: &str, gpu_direct: &str) -> WorkerConfig {
    let store: StoreConfig = serde_json::from_value(json!({
        "ram": "256MiB", "nvme": format!("{}:256MiB", folder.join("disk").display()),
        "planner": planner, "gpu_direct": gpu_direct,
    }))
    .unwrap();
    let kernel_cache = Some(std::env::temp_dir().join("kvik-cuda-tests"));
    WorkerConfig { device: "cuda:0".into(), kv_blocks: 128, kernel_cache, store, ..config() }
}

/// A worker that reads files; `None`, and why, where the library is not there.
async fn start(folder: &Path, planner: &str) -> Option<TestWorker> {
    start_if_possible(config_of(folder, planner, "on")).await
}

#[expect(clippy::print_stderr, reason = "a test that cannot run says so")]
async fn start_if_possible(config: WorkerConfig) -> Option<TestWorker> {
    let shutdown = kvik_runtime::shutdown::Shutdown::new();
    match Worker::start(config.clone(), &shutdown).await {
        Ok(running) => {
            shutdown.finish().await;
            running.closed().await;
            Some(start_with(config).await)
        }
        Err(error) if error.to_string().contains("the library was not found") => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn prompt() -> Vec<u32> {
    (0..600).map(|place| 10 + (place * 37 + place * place % 89) % 2000).collect()
}

/// The text of an answer, and the prompt's tokens by the tier that they came from.
async fn ask(worker: &TestWorker) -> (Value, Value) {
    let body = json!({"prompt": prompt(), "max_tokens": 24, "temperature": 0});
    let answer = worker.client.ask("/v1/completions", &body).await;
    let details = &answer["usage"]["prompt_tokens_details"];
    (answer["choices"][0]["text"].clone(), details["cached_tokens_by_tier"].clone())
}

async fn counts(worker: &TestWorker) -> [u64; 3] {
    counts_of(worker, ["direct_chunks", "direct_bytes", "failed_direct_reads"]).await
}

async fn counts_of<const N: usize>(worker: &TestWorker, names: [&str; N]) -> [u64; N] {
    let stats = worker.client.get("/cache/stats").await.json();
    names.map(|name| stats["counts"][name].as_u64().unwrap())
}

#[tokio::test]
async fn a_prompt_is_read_from_disk_into_the_gpu_and_its_answer_is_the_same() {
    for planner in ["load_all", "auto"] {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let Some(worker) = start(folder.path(), planner).await else { return };
        let (computed, found) = ask(&worker).await;
        assert_eq!(found["nvme"].as_u64().unwrap_or(0), 0);
        worker.client.wait_for_copies().await;
        worker.end().await;

        let worker = start(folder.path(), planner).await.unwrap();
        let (loaded, found) = ask(&worker).await;
        assert_eq!(loaded, computed, "{planner}");
        let [n_chunks, n_bytes, n_failed] = counts(&worker).await;
        assert_eq!(n_failed, 0);
        // The planner may find that computing so little is faster.
        if planner == "load_all" {
            assert_eq!((&found["nvme"], n_chunks), (&json!(512), 2));
            assert!(n_bytes > 0 && n_bytes.is_multiple_of(2));
        }
        worker.end().await;

        // A wrong byte in each page of the chunks: none of it is used, and the answer is the same.
        let path = folder.path().join("disk/segment-00000000.kvik");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mut page = [0; 4096];
        for place in (4096 * 3..4096 * 3 + 4 * n_bytes.max(1 << 20)).step_by(4096) {
            if file.read_exact_at(&mut page, place).is_err() {
                break;
            }
            // Envelopes stay, so that the chunks are found.
            if !page.starts_with(b"KVIK") {
                file.write_all_at(&[page[100] ^ 1], place + 100).unwrap();
            }
        }
        file.sync_all().unwrap();
        let worker = start(folder.path(), planner).await.unwrap();
        let (after, found) = ask(&worker).await;
        assert_eq!(after, computed, "{planner}, with wrong bytes on the disk");
        assert_eq!(found["nvme"].as_u64().unwrap_or(0), 0);
        let [n_chunks, _, n_failed] = counts(&worker).await;
        assert!(n_chunks == 0 && (planner == "auto" || n_failed > 0), "{n_chunks}, {n_failed}");
        worker.end().await;
    }
}

#[tokio::test]
async fn a_worker_that_does_not_read_files_finds_what_one_that_does_has_written() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let worker = start_with(config_of(folder.path(), "load_all", "auto")).await;
    let (computed, _) = ask(&worker).await;
    worker.client.wait_for_copies().await;
    worker.end().await;
    let worker = start_with(config_of(folder.path(), "load_all", "off")).await;
    let (loaded, found) = ask(&worker).await;
    assert_eq!((loaded, &found["nvme"]), (computed, &json!(512)));
    assert_eq!(counts(&worker).await, [0; 3]);
    worker.end().await;
}

#[tokio::test]
async fn a_sequence_that_the_gpu_writes_to_the_disk_is_found_there_by_all_ways_of_reading() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut config = config_of(folder.path(), "load_all", "on");
    config.store.gpu_direct_writes = true;
    let Some(worker) = start_if_possible(config.clone()).await else { return };
    let (computed, _) = ask(&worker).await;
    worker.client.wait_for_copies().await;
    let written = ["direct_written_chunks", "failed_direct_writes", "stored_chunks", "written_chunks_nvme"];
    assert_eq!(counts_of(&worker, written).await, [2, 0, 2, 2]);
    let stats = worker.client.get("/cache/stats").await.json();
    let in_memory = &stats["tiers"].as_array().unwrap()[0];
    assert_eq!((&in_memory["tier"], &in_memory["chunks"]), (&json!("ram"), &json!(0)), "{stats}");
    // The answer is longer by another chunk, whose front is on the disk alone.
    let body = json!({"prompt": prompt(), "max_tokens": 200, "temperature": 0, "ignore_eos": true});
    worker.client.ask("/v1/completions", &body).await;
    worker.client.wait_for_copies().await;
    assert_eq!(counts_of(&worker, written).await, [3, 0, 3, 3]);
    worker.end().await;

    for gpu_direct in ["on", "off"] {
        let worker = start_with(config_of(folder.path(), "load_all", gpu_direct)).await;
        let (loaded, found) = ask(&worker).await;
        assert_eq!((loaded, &found["nvme"]), (computed.clone(), &json!(512)), "{gpu_direct}");
        worker.end().await;
    }
}
