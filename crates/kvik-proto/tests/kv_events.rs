//! KV events, read from what a running vLLM 0.32 published and from malformed bytes.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::fs;
use std::path::PathBuf;

use kvik_proto::events::{
    Attention, BlocksRemoved, BlocksStored, EngineHash, EventBatch, ExtraKey, KvEvent, Medium, Topic,
    parse_sequence,
};
use kvik_types::BlockSize;
use kvik_types::hash::{ExtraKey as ChainKey, HashChain as _, VllmAlgorithm, VllmChain, VllmHash, VllmSeed};
use proptest::prelude::*;
use serde_json::Value;

fn fixture(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vllm-events");
    fs::read(folder.join(name)).unwrap()
}

/// The pod, the sequence number and the events of a captured message.
fn captured(name: &str) -> (String, u64, EventBatch) {
    let frames: Vec<Vec<u8>> = (0..3).map(|frame| fixture(&format!("{name}_frame{frame}.bin"))).collect();
    let topic = Topic::parse(&frames[0]).unwrap();
    assert_eq!(topic.model, Some("tiny"));
    let sequence = parse_sequence(&frames[1]).unwrap();
    (topic.pod.to_owned(), sequence, EventBatch::decode(&frames[2]).unwrap())
}

/// Appends msgpack to a message under construction.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn array(self, n_elements: u8) -> Self {
        self.raw(&[0x90 | n_elements])
    }

    fn text(self, text: &str) -> Self {
        self.raw(&[0xd9, text.len() as u8]).raw(text.as_bytes())
    }

    fn number(self, number: u64) -> Self {
        self.raw(&[0xcf]).raw(&number.to_be_bytes())
    }

    fn signed(self, number: i64) -> Self {
        self.raw(&[0xd3]).raw(&number.to_be_bytes())
    }

    fn nil(self) -> Self {
        self.raw(&[0xc0])
    }

    fn batch(n_events: u8) -> Self {
        Self::default().array(2).raw(&[0xcb]).raw(&1.5_f64.to_be_bytes()).array(n_events)
    }

    fn decode(&self) -> Result<EventBatch, String> {
        EventBatch::decode(&self.0).map_err(|error| error.to_string())
    }
}

#[test]
fn every_captured_message_reads_as_the_engine_wrote_it() {
    let steps: Vec<Value> = serde_json::from_slice(&fixture("b32_sha256.json")).unwrap();
    let messages: Vec<&Value> = steps.iter().filter(|step| step["decoded"].is_array()).collect();
    assert!(messages.len() >= 5, "the capture has {} messages", messages.len());
    for (place, message) in messages.iter().enumerate() {
        let (pod, sequence, batch) = captured(&format!("b32_sha256_{place:03}"));
        assert_eq!(pod, "pod1");
        assert_eq!(sequence, message["seq"].as_u64().unwrap());
        let decoded = message["decoded"].as_array().unwrap();
        assert_eq!(batch.published_s.to_string(), decoded[0].as_f64().unwrap().to_string());
        assert_eq!(batch.data_parallel_rank, decoded[2].as_u64().map(|rank| rank as u32));
        assert_eq!(batch.n_unknown, 0);
        let events = decoded[1].as_array().unwrap();
        assert_eq!(batch.events.len(), events.len());
        for (event, expected) in batch.events.iter().zip(events) {
            assert_event(event, expected);
        }
    }
}

fn assert_event(event: &KvEvent, expected: &Value) {
    let numbers = |field: &str| -> Vec<u64> {
        expected[field].as_array().unwrap().iter().map(|value| value.as_u64().unwrap()).collect()
    };
    match (event, expected["type"].as_str().unwrap()) {
        (KvEvent::Stored(stored), "BlockStored") => {
            assert_eq!(
                stored.hashes,
                numbers("block_hashes").into_iter().map(EngineHash).collect::<Vec<_>>()
            );
            assert_eq!(stored.parent.map(|hash| hash.0), expected["parent_block_hash"].as_u64());
            assert_eq!(
                stored.tokens.iter().map(|token| u64::from(*token)).collect::<Vec<_>>(),
                numbers("token_ids")
            );
            assert_eq!(u64::from(stored.block_tokens), expected["block_size"].as_u64().unwrap());
            assert_eq!((stored.medium, stored.group_idx), (Medium::Gpu, Some(0)));
            for (keys, expected) in stored.extra_keys.iter().zip(expected["extra_keys"].as_array().unwrap()) {
                let texts: Vec<&str> = expected
                    .as_array()
                    .map(|texts| texts.iter().map(|text| text.as_str().unwrap()).collect())
                    .unwrap_or_default();
                let read: Vec<&str> = keys
                    .iter()
                    .map(|key| match key {
                        ExtraKey::Text(text) => text.as_str(),
                        other => panic!("{other:?}"),
                    })
                    .collect();
                assert_eq!(read, texts);
            }
        }
        (KvEvent::Removed(removed), "BlockRemoved") => {
            assert_eq!(
                removed.hashes,
                numbers("block_hashes").into_iter().map(EngineHash).collect::<Vec<_>>()
            );
        }
        (KvEvent::Cleared, "AllBlocksCleared") => {}
        (event, expected) => panic!("{event:?} is not {expected}"),
    }
}

#[test]
fn block_hashes_recomputed_from_the_captured_tokens_are_the_published_ones() {
    let mut digests = std::collections::HashMap::<EngineHash, VllmHash>::new();
    let mut n_checked = 0;
    for place in 0..6 {
        for event in captured(&format!("b32_sha256_{place:03}")).2.events {
            let KvEvent::Stored(stored) = event else { continue };
            let parent = stored.parent.map(|parent| digests[&parent]);
            let seed = match &parent {
                Some(digest) => VllmSeed::Parent(digest.as_bytes()),
                None => VllmSeed::Default,
            };
            n_checked += check_hashes(&stored, VllmAlgorithm::Sha256, seed, |hash, digest| {
                digests.insert(hash, digest);
            });
        }
    }
    assert!(n_checked > 60, "{n_checked} blocks");
    let (_, _, batch) = captured("b32_sha256cbor_int_000");
    let KvEvent::Stored(stored) = &batch.events[0] else { panic!("{batch:?}") };
    assert_eq!(check_hashes(stored, VllmAlgorithm::Sha256Cbor, VllmSeed::Default, |_, _| {}), 4);
}

fn check_hashes(
    stored: &BlocksStored,
    algorithm: VllmAlgorithm,
    seed: VllmSeed<'_>,
    mut note: impl FnMut(EngineHash, VllmHash),
) -> usize {
    let block_size = BlockSize::try_new(stored.block_tokens as usize).unwrap();
    let mut chain = VllmChain::try_new(algorithm, block_size, seed).unwrap();
    for (idx, tokens) in stored.tokens.chunks(block_size.get()).enumerate() {
        let salts: Vec<ChainKey<'_>> = stored.extra_keys[idx]
            .iter()
            .map(|key| match key {
                ExtraKey::Text(salt) => ChainKey::CacheSalt(salt),
                other => panic!("{other:?}"),
            })
            .collect();
        let digest = if salts.is_empty() {
            chain.push_block(tokens)
        } else {
            chain.push_block_with_extra_keys(tokens, &salts).unwrap()
        };
        let published = stored.hashes[idx];
        assert_eq!(EngineHash(digest.event_id()), published);
        note(published, digest);
    }
    stored.hashes.len()
}

#[test]
fn the_answers_of_the_replay_socket_are_the_messages_again() {
    for place in 0..5 {
        let frame = |frame: usize| fixture(&format!("b32_sha256_replay{place:03}_frame{frame}.bin"));
        assert!(frame(0).is_empty());
        let (_, sequence, batch) = captured(&format!("b32_sha256_{:03}", place + 1));
        assert_eq!(parse_sequence(&frame(2)).unwrap(), sequence);
        assert_eq!(EventBatch::decode(&frame(3)).unwrap(), batch);
    }
    assert_eq!(parse_sequence(&fixture("b32_sha256_replay005_frame2.bin")).unwrap(), u64::MAX);
}

#[test]
fn the_array_form_of_earlier_releases_reads_the_same() {
    let message = Message::batch(3)
        .array(7)
        .text("BlockStored")
        .array(2)
        .number(7)
        .number(8)
        .number(6)
        .array(4)
        .raw(&[1, 2, 3, 4])
        .number(2)
        .nil()
        .text("cpu")
        .array(3)
        .text("BlockRemoved")
        .array(1)
        .number(7)
        .text("STORAGE")
        .array(1)
        .text("AllBlocksCleared");
    let batch = message.decode().unwrap();
    let stored = BlocksStored {
        hashes: vec![EngineHash(7), EngineHash(8)],
        parent: Some(EngineHash(6)),
        tokens: vec![1, 2, 3, 4],
        block_tokens: 2,
        medium: Medium::Cpu,
        ..BlocksStored::default()
    };
    let removed =
        BlocksRemoved { hashes: vec![EngineHash(7)], medium: Medium::Disk, ..BlocksRemoved::default() };
    assert_eq!(batch.events, [KvEvent::Stored(stored), KvEvent::Removed(removed), KvEvent::Cleared]);
    assert_eq!((batch.published_s, batch.data_parallel_rank), (1.5, None));
}

/// A stored block of two tokens in the array form, up to its tokens.
fn array_form(n_fields: u8) -> Message {
    Message::batch(1).array(n_fields).text("BlockStored").array(1).number(7).nil()
}

#[test]
fn a_salt_is_read_in_both_forms_of_sglang() {
    let in_array = array_form(8)
        .array(2)
        .raw(&[1, 2])
        .number(2)
        .nil()
        .text("GPU")
        .raw(&[0x82])
        .text("other")
        .array(1)
        .nil()
        .text("cache_salt")
        .text("tenant");
    let in_map = Message::batch(1)
        .raw(&[0x85])
        .text("type")
        .text("BlockStored")
        .text("block_hashes")
        .array(1)
        .number(7)
        .text("token_ids")
        .array(2)
        .raw(&[1, 2])
        .text("block_size")
        .number(2)
        .text("cache_salt")
        .text("tenant");
    for message in [in_array, in_map] {
        let batch = message.decode().unwrap();
        let KvEvent::Stored(stored) = &batch.events[0] else { panic!("{batch:?}") };
        assert_eq!((stored.salt.as_deref(), stored.lora_name.as_deref()), (Some("tenant"), None));
        assert!(!stored.is_plain());
    }
}

#[test]
fn pairs_of_tokens_are_read_as_the_tokens_and_the_one_behind_them() {
    let pairs = |pairs: &[[u8; 2]]| {
        let message = array_form(5).array(pairs.len() as u8);
        pairs.iter().fold(message, |message, pair| message.array(2).raw(pair)).number(2)
    };
    let batch = pairs(&[[1, 2], [2, 3]]).decode().unwrap();
    let KvEvent::Stored(stored) = &batch.events[0] else { panic!("{batch:?}") };
    assert_eq!((&stored.tokens[..], stored.is_paired), (&[1, 2, 3][..], true));
    assert!(pairs(&[[1, 2], [3, 4]]).decode().unwrap_err().contains("does not go on"));
    assert!(pairs(&[[1, 2]]).decode().unwrap_err().contains("a number of tokens"));
    let three = array_form(5).array(2).array(3).raw(&[1, 2, 3]).array(3).raw(&[2, 3, 4]).number(2);
    assert!(three.decode().unwrap_err().contains("not two"));
    let mixed = array_form(5).array(2).array(2).raw(&[1, 2]).raw(&[2]).number(2);
    assert!(mixed.decode().unwrap_err().contains("not an array"));
}

#[test]
fn what_a_cache_group_looks_back_at_is_read() {
    let (_, _, batch) = captured("b32_sha256_000");
    let KvEvent::Stored(stored) = &batch.events[0] else { panic!("{batch:?}") };
    assert_eq!(stored.attention, Attention::Full);
    let fields = array_form(11).array(0).number(0).nil().nil().nil().nil().number(3).text("sliding_window");
    let KvEvent::Stored(stored) = &fields.decode().unwrap().events[0] else {
        panic!("{fields:?}", fields = fields.0)
    };
    assert_eq!((stored.group_idx, stored.attention), (Some(3), Attention::Partial));
}

#[test]
fn signed_integers_and_digests_name_blocks_by_the_same_64_bits() {
    let digest = [&[9; 24][..], &(-3_488_128_144_981_237_669_i64).to_be_bytes()].concat();
    let message = Message::batch(1)
        .array(2)
        .text("BlockRemoved")
        .array(2)
        .signed(-3_488_128_144_981_237_669)
        .raw(&[0xc4, 32])
        .raw(&digest);
    let batch = message.decode().unwrap();
    let KvEvent::Removed(removed) = &batch.events[0] else { panic!("{batch:?}") };
    assert_eq!(removed.hashes[0], removed.hashes[1]);
    assert_eq!(removed.hashes[0].0, (-3_488_128_144_981_237_669_i64).cast_unsigned());
}

#[test]
fn unknown_events_and_fields_are_passed_over_and_events_counted() {
    let message = Message::batch(2)
        .array(3)
        .text("BlockTeleported")
        .array(2)
        .number(1)
        .raw(&[0x81, 0xa1, b'a', 0xc0])
        .nil()
        .raw(&[0x83])
        .text("later")
        .array(1)
        .nil()
        .text("block_hashes")
        .array(1)
        .number(5)
        .text("type")
        .text("BlockRemoved");
    let batch = message.decode().unwrap();
    assert_eq!(batch.n_unknown, 1);
    let removed = BlocksRemoved { hashes: vec![EngineHash(5)], ..BlocksRemoved::default() };
    assert_eq!(batch.events, [KvEvent::Removed(removed)]);
}

#[test]
fn what_is_malformed_is_refused_with_its_place() {
    let stored = |tokens: &[u8]| {
        let message = Message::batch(1).array(5).text("BlockStored").array(1).number(1).nil();
        message.array(tokens.len() as u8).raw(tokens).raw(&[2])
    };
    assert!(stored(&[1, 2]).decode().is_ok());
    for (message, what) in [
        (Message::default(), "end comes too early"),
        (Message::default().array(1).nil(), "without events"),
        (Message::batch(1), "length beyond the end"),
        (Message::batch(0).nil(), "bytes behind"),
        (Message::batch(1).array(0), "without a type"),
        (Message::batch(1).raw(&[0x80]), "without a type"),
        (Message::batch(1).array(1).text("BlockStored"), "without names"),
        (stored(&[1]), "number of tokens"),
        (
            Message::batch(1).array(2).text("BlockRemoved").raw(&[0xdd, 0xff, 0xff, 0xff, 0xff]),
            "beyond the end",
        ),
        (Message::batch(1).array(2).text("BlockRemoved").array(1).raw(&[0xc4, 2, 1, 2]), "below 8 bytes"),
        (Message::batch(1).array(1).raw(&[0xa1, 0xff]), "not UTF-8"),
        (Message::batch(1).array(2).text("x").raw(&[0x91; 64]), "nested too deeply"),
        (Message::batch(1).array(2).text("x").raw(&[0xc1]), "no value begins with"),
    ] {
        let error = message.decode().unwrap_err();
        assert!(error.contains(what) && error.contains("byte "), "{error} instead of {what}");
    }
    assert!(parse_sequence(&[0; 7]).is_err() && parse_sequence(&[0; 9]).is_err());
}

#[test]
fn a_topic_that_is_not_in_three_parts_is_a_pod() {
    let parse = |text: &'static str| Topic::parse(text.as_bytes()).unwrap();
    assert_eq!(
        parse("kv@10.0.0.1:8000@org/model@v2"),
        Topic { pod: "10.0.0.1:8000", model: Some("org/model@v2") }
    );
    assert_eq!(parse("kv@pod"), Topic { pod: "kv@pod", model: None });
    assert_eq!(parse("kv@@m"), Topic { pod: "kv@@m", model: None });
    assert_eq!(parse("events"), Topic { pod: "events", model: None });
    assert!(Topic::parse(b"").is_err() && Topic::parse(&[0xff]).is_err());
}

proptest! {
    #[test]
    fn random_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        let _ = EventBatch::decode(&bytes);
    }

    #[test]
    fn a_captured_message_with_changed_bytes_is_read_or_refused(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        n_bytes in any::<prop::sample::Index>(),
    ) {
        let mut bytes = fixture("b32_sha256_003_frame2.bin");
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        let _ = EventBatch::decode(&bytes);
        let _ = EventBatch::decode(&bytes[..n_bytes.index(bytes.len())]);
    }
}
