//! The captured stream of a running vLLM 0.32, from its bytes to scores.

use std::fs;
use std::path::PathBuf;

use kvik_index::holders::Verdict;
use kvik_indexer::IndexConfig;
use kvik_indexer::feed::{FeedBatch, Naming};
use kvik_proto::events::{EventBatch, KvEvent, parse_sequence};

use crate::engine::{matched, open, start};

fn frame(message: usize, frame: usize) -> Option<Vec<u8>> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../kvik-proto/tests/fixtures/vllm-events");
    fs::read(folder.join(format!("b32_sha256_{message:03}_frame{frame}.bin"))).ok()
}

#[tokio::test]
async fn a_captured_stream_is_indexed_by_the_engines_own_hashes() {
    let (indexer, _shutdown) = start(&IndexConfig::default()).await;
    let feed = open(&indexer, "pod1", Naming::Learned).await;
    let mut n_messages = 0;
    while let Some(payload) = frame(n_messages, 2) {
        let sequence = parse_sequence(&frame(n_messages, 1).unwrap()).unwrap();
        let batch = EventBatch::decode(&payload).unwrap();
        let plain = batch.events.iter().find_map(|event| match event {
            KvEvent::Stored(stored)
                if stored.parent.is_none()
                    && stored.lora_name.is_none()
                    && stored.extra_keys.iter().all(Vec::is_empty) =>
            {
                Some(stored.tokens.clone())
            }
            _ => None,
        });
        let fed = FeedBatch {
            epoch: None,
            sequence,
            replayed: false,
            published_s: batch.published_s,
            events: batch.events,
        };
        assert_eq!(feed.apply(fed).await.unwrap(), Verdict::Applied);
        if let Some(tokens) = plain {
            assert_eq!(matched(&indexer, "pod1", &tokens).await, tokens.len() as u64);
        }
        n_messages += 1;
    }
    assert!(n_messages >= 5);
    let stats = indexer.stats().await.unwrap();
    let book = stats[0].books.iter().find(|book| !book.sources.is_empty()).unwrap();
    assert!(book.keys.starts_with("vllm:sha256:"), "{}", book.keys);
}
