//! A worker that is killed while it codes the chunks of its disk again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::cluster::{Client, Role};
use crate::http;
use crate::process::{self, Process, eventually};

/// Thirty-seven chunks and some.
const PROMPT_TOKENS: u32 = 1200;
const N_CHUNKS: usize = 37;

/// A few times what the chunks take before they are coded again: what a kill leaves behind for ever would soon fill it.
const NVME: &str = "32MiB";

/// Enough that a run does not pause.
const BYTES_PER_S: &str = "1000000000000";

/// Layers of a chunk, by their names.
type ChunkBytes = BTreeMap<String, Vec<u8>>;

/// One worker after the other on a disk.
struct Disk {
    folder: PathBuf,
    worker: Role,
}

/// What a chunk may be found as.
struct Expected {
    original: Vec<ChunkBytes>,
    compressed: Vec<ChunkBytes>,
}

impl Disk {
    #[track_caller]
    fn start(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), worker: start_worker(folder) }
    }

    /// Kills the worker and starts another one.
    #[track_caller]
    fn kill(&mut self) {
        self.worker.process.kill();
        self.worker = start_worker(&self.folder);
    }

    fn file(&self) -> String {
        self.folder.join("kv.safetensors").display().to_string()
    }

    /// What the disk has of the prompt, chunk by chunk.
    #[track_caller]
    fn read(&self) -> Vec<ChunkBytes> {
        let file = self.file();
        self.kvctl(&["retrieve", "--token-ids", &token_ids(), "--tier", "nvme", "-o", &file]);
        chunks_of(&std::fs::read(&file).unwrap())
    }

    fn status(&self) -> Value {
        http::get_json(&self.worker.client.address, "/cache/compress").unwrap()
    }

    /// Chunks and bytes that the disk holds.
    #[track_caller]
    fn usage(&self) -> (Value, Value) {
        let health = self.kvctl(&["health"]);
        let nvme = health["tiers"].as_array().unwrap().iter().find(|tier| tier["tier"] == "nvme").unwrap();
        assert_eq!(nvme["state"], "up", "{health}");
        (nvme["chunks"].clone(), nvme["used_bytes"].clone())
    }

    /// Begins to code the chunks again; `more` may wait for the end.
    #[track_caller]
    fn compress(&self, more: &[&str]) -> Value {
        let arguments = ["compress", "--codec", "int8", "--idle-s", "0", "--bytes-per-s", BYTES_PER_S];
        self.kvctl(&[&arguments[..], more].concat())
    }

    #[track_caller]
    fn kvctl(&self, arguments: &[&str]) -> Value {
        let output = Command::new(env!("CARGO_BIN_EXE_kvctl"))
            .args(["--json", "cache", "--worker", &format!("http://{}", self.worker.client.address)])
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // `retrieve` says nothing beside the file.
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }
}

impl Expected {
    /// How many chunks are compressed; every one is there, and is one or the other.
    #[track_caller]
    fn count_compressed(&self, found: &[ChunkBytes]) -> usize {
        assert_eq!(found.len(), N_CHUNKS, "chunks are lost");
        let is_compressed = |(idx, chunk): (usize, &ChunkBytes)| {
            assert!(
                *chunk == self.original[idx] || *chunk == self.compressed[idx],
                "chunk {idx} has bytes that it never had"
            );
            *chunk == self.compressed[idx]
        };
        found.iter().enumerate().filter(|chunk| is_compressed((chunk.0, chunk.1))).count()
    }
}

/// Kills a worker so many times while it codes its disk again: every chunk is found as it was or as it will be, none is lost, what
/// was said to be done stays done, and in the end the disk holds what it would without a kill.
pub(crate) fn kill_compressions(n_kills: usize) {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = Disk::start(folder.path());
    let body = json!({"prompt": prompt(), "max_tokens": 1});
    let answer = http::send(&disk.worker.client.address, "POST", "/v1/completions", Some(&body)).unwrap();
    assert_eq!(answer.status, 200);
    eventually("the chunks are on the disk", || {
        let stats = disk.kvctl(&["stats"]);
        (stats["counts"]["written_chunks_nvme"] == N_CHUNKS).then_some(())
    });
    let original = disk.read();
    let stored = folder.path().join("original.safetensors");
    std::fs::rename(disk.file(), &stored).unwrap();
    // Without a kill.
    let status = disk.compress(&["--wait"]);
    assert_eq!((&status["state"], &status["recoded_chunks"]), (&json!("done"), &json!(N_CHUNKS)), "{status}");
    let (compressed, usage) = (disk.read(), disk.usage());
    let expected = Expected { original, compressed };
    assert_eq!(expected.count_compressed(&expected.original), 0, "the codec changes every chunk");

    // Kills that met a run, and all.
    let (mut n_met, mut n_killed) = (0, 0);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next_random = move |end: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % end
    };
    while n_met < n_kills {
        disk.kvctl(&["clear", "--all"]);
        let again = disk.kvctl(&["store", &stored.display().to_string(), "--tier", "nvme"]);
        assert_eq!(again["stored_chunks"], N_CHUNKS, "there is room for them again: {again}");
        let mut n_compressed = 0;
        while n_compressed < N_CHUNKS && n_met < n_kills {
            disk.compress(&[]);
            let n_wanted = 1 + next_random(5);
            let is_far = |status: &Value| {
                status["state"] != "running" || status["recoded_chunks"].as_u64().unwrap() >= n_wanted
            };
            eventually("it has come so far", || is_far(&disk.status()).then_some(()));
            // Any moment of coding, writing and telling the index.
            for _ in 0..next_random(8) {
                disk.status();
            }
            let status = disk.status();
            assert!(status["state"] != "failed", "{status}");
            disk.kill();
            n_killed += 1;
            n_met += usize::from(status["state"] == "running");
            assert!(n_killed <= 10 * n_kills, "runs end before they are met: {n_met} of {n_killed}");
            let n_done = n_compressed + status["recoded_chunks"].as_u64().unwrap() as usize;
            n_compressed = expected.count_compressed(&disk.read());
            assert!(n_compressed >= n_done, "{n_done} were done before the kill, and {n_compressed} are");
        }
    }
    let status = disk.compress(&["--wait"]);
    assert_eq!(status["state"], "done", "{status}");
    assert_eq!(expected.count_compressed(&disk.read()), N_CHUNKS);
    assert_eq!(disk.usage(), usage, "as much as without a kill");
    disk.kvctl(&["clear", "--all"]);
    assert_eq!(disk.usage(), (json!(0), json!(0)));
}

#[track_caller]
fn start_worker(folder: &Path) -> Role {
    let mut command = process::kvik();
    command.args(["worker", "--log-format", "json", "--listen", "127.0.0.1:0", "--threads", "1"]);
    command.args(["--ram", "64MiB", "--nvme"]).arg(format!("{}:{NVME}", folder.join("nvme").display()));
    for setting in ["nvme_codec=lossless", "allow_lossy=[int8]", "chunk_tokens=32", "planner=load_all"] {
        command.arg("--set").arg(format!("store.{setting}"));
    }
    let mut process = Process::start(&mut command);
    let address = process.logged("worker is ready")["address"].as_str().unwrap().to_owned();
    Role { process, client: Client { address } }
}

fn prompt() -> Vec<u32> {
    (0..PROMPT_TOKENS).map(|position| 100 + (position * 7 + 131) % 3000).collect()
}

fn token_ids() -> String {
    prompt().iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// The chunks of a safetensors file, whose tensors are called `chunk.N.layer.N`.
fn chunks_of(bytes: &[u8]) -> Vec<ChunkBytes> {
    let (n_header_bytes, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*n_header_bytes) as usize);
    let header: BTreeMap<String, Value> = serde_json::from_slice(header).unwrap();
    let mut chunks = BTreeMap::<usize, ChunkBytes>::new();
    for (name, tensor) in &header {
        let Some((chunk_idx, layer)) = name.strip_prefix("chunk.").and_then(|name| name.split_once('.'))
        else {
            continue;
        };
        let [start, end] = [0, 1].map(|idx| tensor["data_offsets"][idx].as_u64().unwrap() as usize);
        let layers = chunks.entry(chunk_idx.parse().unwrap()).or_default();
        layers.insert(layer.to_owned(), data[start..end].to_vec());
    }
    assert!(chunks.keys().copied().eq(0..chunks.len()), "{:?}", chunks.keys());
    chunks.into_values().collect()
}
