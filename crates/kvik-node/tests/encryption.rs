//! A store whose disk and Redis server are sealed with keys from a file.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

#[path = "../../../tests/support/redis.rs"]
#[expect(dead_code, reason = "other tests need more of it")]
mod redis;

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvik_node::{StoreConfig, open_store};
use kvik_store::{Chain, ChunkFormat, Commit, Store, Write};
use kvik_tier::TierKind;
use kvik_types::{BlockSize, Dtype, Namespace};
use redis::RedisServer;

const N_CHUNKS: usize = 4;
const N_LAYERS: usize = 4;
const CHUNK_TOKENS: usize = 32;
const CHUNK_BYTES: usize = CHUNK_TOKENS * N_LAYERS * 256;

const OLD: &str = "00000000000000000000000000000000000000000000000000000000000000aa";
const NEW: &str = "00000000000000000000000000000000000000000000000000000000000000bb";

/// What every 32 bytes of a chunk begin with.
const MARKER: &[u8; 24] = b"plain text of a KV chunk";

/// What a store is opened on, again and again.
struct Place {
    folder: tempfile::TempDir,
    redis: RedisServer,
    keys: Option<PathBuf>,
}

impl Place {
    fn new(key: Option<&str>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let redis = RedisServer::start(&["--save", "", "--rdbcompression", "no"]);
        let mut place = Self { folder, redis, keys: None };
        if let Some(key) = key {
            place.keys = Some(place.folder.path().join("keys"));
            place.set_keys(key);
        }
        place
    }

    fn set_keys(&self, text: &str) {
        let path = self.keys.as_deref().unwrap();
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }

    fn open(&self, disk: &str) -> Store {
        let config = StoreConfig {
            ram: "32MiB".to_owned(),
            nvme: Some(format!("{}:16MiB", self.folder.path().join(disk).display())),
            remote: Some(self.redis.url().into()),
            remote_timeout_ms: 20_000,
            load_timeout_ms: 20_000,
            chunk_tokens: CHUNK_TOKENS,
            encryption_key_file: self.keys.clone(),
            ..StoreConfig::default()
        };
        open_store(&config, &config.resolve().unwrap().unwrap(), None).unwrap()
    }

    /// Whether the marker is on the disk, and in what the server saves.
    fn has_plain_text(&self, disk: &str) -> (bool, bool) {
        self.redis.cli(&["SAVE"]);
        let files = std::fs::read_dir(self.folder.path().join(disk)).unwrap();
        let on_disk = files.map(|file| std::fs::read(file.unwrap().path()).unwrap());
        let saved = std::fs::read(self.redis.folder().join("dump.rdb")).unwrap();
        assert!(saved.len() > N_CHUNKS * CHUNK_BYTES, "the server has nothing");
        (on_disk.into_iter().any(|bytes| has_marker(&bytes)), has_marker(&saved))
    }
}

fn has_marker(bytes: &[u8]) -> bool {
    bytes.windows(MARKER.len()).any(|window| window == MARKER)
}

fn chain(store: &Store) -> Chain {
    let namespace =
        Namespace { model: "m".into(), dtype: Dtype::BF16, layout: "l".into(), tenant: String::new() };
    let format = ChunkFormat {
        n_layers: N_LAYERS as u32,
        token_layer_bytes: 256,
        n_ranks: 1,
        block_tokens: BlockSize::try_new(16).unwrap(),
    };
    let tokens: Vec<u32> = (0..(N_CHUNKS * CHUNK_TOKENS) as u32).collect();
    store.space(&namespace, format).unwrap().chain(&tokens)
}

fn content(chunk_idx: usize) -> Vec<u8> {
    (0..CHUNK_BYTES as u64 / 32)
        .flat_map(|place| [MARKER, (place << 8 | chunk_idx as u64).to_le_bytes().as_slice()].concat())
        .collect()
}

/// Stores the chain, down to the last tier; returns how many chunks were not in memory.
fn fill(store: &Store) -> usize {
    let chain = chain(store);
    let mut n_stored = 0;
    for chunk_idx in 0..N_CHUNKS {
        if let Write::Slot(mut writer) = store.begin_write(&chain, chunk_idx, 0) {
            writer.payload_mut().copy_from_slice(&content(chunk_idx));
            assert_eq!(writer.commit(), Commit::Stored);
            n_stored += 1;
        }
    }
    assert!(store.flush(Duration::from_mins(1)));
    n_stored
}

/// Reads the chain; returns the tier of each chunk that is there and right.
fn tiers_of_hits(store: &Store) -> Vec<TierKind> {
    let retrieved = store.retrieve(&chain(store), 0);
    for (chunk, chunk_idx) in retrieved.chunks().iter().zip(0..) {
        assert!(chunk.payload(0) == content(chunk_idx), "chunk {chunk_idx} has other bytes");
    }
    retrieved.chunks().iter().map(kvik_store::RetrievedChunk::tier).collect()
}

fn hits_by_layer(store: &Store) -> usize {
    let mut reader = store.retrieve_layers(&chain(store), 0);
    let mut n_layers = 0;
    while let Some(layer) = reader.next_layer() {
        for chunk_idx in 0..layer.n_chunks() {
            let section_bytes = CHUNK_BYTES / N_LAYERS;
            let expected = &content(chunk_idx)[layer.idx() * section_bytes..][..section_bytes];
            assert!(layer.section(chunk_idx, 0) == expected, "chunk {chunk_idx} has other bytes");
        }
        assert_eq!(layer.n_chunks(), N_CHUNKS);
        n_layers += 1;
    }
    n_layers
}

fn unknown_key_reads(store: &Store) -> u64 {
    let details = store.health().into_iter().flat_map(|(_, stat)| stat.details);
    details.filter(|(name, _)| *name == "unknown_key_reads").map(|(_, count)| count).sum()
}

#[test]
fn disk_and_redis_are_sealed_and_read_again_with_the_key_alone() {
    let place = Place::new(Some(OLD));
    let store = place.open("disk");
    assert_eq!(fill(&store), N_CHUNKS);
    drop(store);
    assert_eq!(place.has_plain_text("disk"), (false, false));
    // From the disk, by layers and whole.
    assert_eq!(hits_by_layer(&place.open("disk")), N_LAYERS);
    assert_eq!(tiers_of_hits(&place.open("disk")), [TierKind::Nvme; N_CHUNKS]);
    // From Redis, on another machine.
    assert_eq!(tiers_of_hits(&place.open("another disk")), [TierKind::Redis; N_CHUNKS]);
    // A new key seals from now on, and the old one opens.
    place.set_keys(&format!("{NEW}\n{OLD}\n"));
    assert_eq!(tiers_of_hits(&place.open("disk")), [TierKind::Nvme; N_CHUNKS]);
    // Without the old one nothing is read, and nothing stands in the way of being stored again.
    place.set_keys(NEW);
    let store = place.open("disk");
    assert_eq!(tiers_of_hits(&store), []);
    assert!(unknown_key_reads(&store) > 0);
    assert_eq!(fill(&store), N_CHUNKS);
    drop(store);
    // A read ends at the first chunk that is missing. Those behind it are stored again once they were missed themselves.
    for _ in 1..N_CHUNKS {
        let store = place.open("disk");
        tiers_of_hits(&store);
        fill(&store);
    }
    assert_eq!(tiers_of_hits(&place.open("disk")), [TierKind::Nvme; N_CHUNKS]);
    assert_eq!(tiers_of_hits(&place.open("a third disk")), [TierKind::Redis; N_CHUNKS]);
}

#[test]
fn without_a_key_disk_and_redis_have_plain_text() {
    // What the test above looks for can be found.
    let place = Place::new(None);
    let store = place.open("disk");
    assert_eq!(fill(&store), N_CHUNKS);
    drop(store);
    assert_eq!(place.has_plain_text("disk"), (true, true));
}

#[test]
fn a_key_file_that_cannot_be_used_is_refused_by_its_setting() {
    let folder = tempfile::tempdir().unwrap();
    let message = |path: &Path| {
        let config = StoreConfig {
            ram: "1MiB".to_owned(),
            encryption_key_file: Some(path.to_owned()),
            ..StoreConfig::default()
        };
        open_store(&config, &config.resolve().unwrap().unwrap(), None).unwrap_err().to_string()
    };
    let path = folder.path().join("keys");
    assert!(message(&path).contains("`store.encryption_key_file` is"));
    std::fs::write(&path, "canary").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let text = message(&path);
    assert!(text.contains("line 1") && !text.contains("canary"), "{text}");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let text = message(&path);
    assert!(text.contains("mode of the encryption keys") && text.contains("0644"), "{text}");
}
