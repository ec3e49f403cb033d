//! Which chain an engine uses, found out from an event.

use kvik_proto::events::BlocksStored;
use kvik_types::BlockSize;
use kvik_types::hash::VllmAlgorithm;

use super::{KeyKind, Keys};

/// The chain that gives the hash of the first block of an event for its tokens.
///
/// `seeds` are values of `PYTHONHASHSEED` that engines may run with, tried after the default. `None` where the event
/// proves nothing: it has a parent, no tokens, or something besides tokens; `Some(None)` where it proves
/// that no chain known here is the engine's.
pub fn recognize(event: &BlocksStored, seeds: &[String]) -> Option<Option<Keys>> {
    if event.parent.is_some() || !event.is_plain() {
        return None;
    }
    let block_tokens = BlockSize::try_new(event.block_tokens as usize).ok()?;
    let first = event.tokens.get(..block_tokens.get() + usize::from(event.is_paired))?;
    let hash = event.hashes.first()?;
    let seeds = || std::iter::once(None).chain(seeds.iter().cloned().map(Some));
    let algorithms =
        [VllmAlgorithm::Sha256, VllmAlgorithm::Sha256Cbor, VllmAlgorithm::Xxhash, VllmAlgorithm::XxhashCbor];
    let vllm = algorithms
        .into_iter()
        .flat_map(|algorithm| seeds().map(move |seed| KeyKind::Vllm { algorithm, seed }));
    let kinds = vllm.chain([KeyKind::Sglang]).filter(|_| !event.is_paired);
    let paired = event.is_paired.then_some(KeyKind::SglangPairs);
    let mut keys = Vec::with_capacity(1);
    Some(kinds.chain(paired).map(|kind| Keys { kind, block_tokens }).find(|candidate| {
        keys.clear();
        candidate.extend(first, &mut keys);
        keys.first().is_some_and(|key| key.0 == hash.0)
    }))
}

#[cfg(test)]
mod tests {
    use kvik_proto::events::EngineHash;
    use kvik_types::hash::{HashChain as _, SglangChain};

    use super::*;

    fn stored(hash: u64) -> BlocksStored {
        BlocksStored {
            hashes: vec![EngineHash(hash)],
            tokens: vec![1, 2, 3, 4],
            block_tokens: 4,
            ..BlocksStored::default()
        }
    }

    fn first_key(kind: KeyKind) -> (Keys, u64) {
        let keys = Keys { kind, block_tokens: BlockSize::try_new(4).unwrap() };
        let mut found = Vec::new();
        keys.extend(&[1, 2, 3, 4], &mut found);
        (keys, found[0].0)
    }

    #[test]
    fn every_chain_is_recognized_by_its_first_block() {
        let seeds = ["0".to_owned()];
        for kind in [
            KeyKind::Vllm { algorithm: VllmAlgorithm::Sha256, seed: None },
            KeyKind::Vllm { algorithm: VllmAlgorithm::Sha256Cbor, seed: None },
            KeyKind::Vllm { algorithm: VllmAlgorithm::Sha256, seed: Some("0".to_owned()) },
            KeyKind::Vllm { algorithm: VllmAlgorithm::Xxhash, seed: Some("0".to_owned()) },
            KeyKind::Sglang,
        ] {
            let (keys, hash) = first_key(kind);
            assert_eq!(recognize(&stored(hash), &seeds), Some(Some(keys)));
        }
        let page = SglangChain::new(BlockSize::try_new(4).unwrap()).push_block(&[1, 2, 3, 4]);
        assert_eq!(page.event_id(), -3_488_128_144_981_237_669);
    }

    #[test]
    fn pairs_of_tokens_are_a_chain_of_their_own() {
        let block_tokens = BlockSize::try_new(4).unwrap();
        let page = SglangChain::new(block_tokens).with_bigrams().push_block(&[1, 2, 3, 4, 5]);
        let hash = page.event_id().cast_unsigned();
        let keys = Keys { kind: KeyKind::SglangPairs, block_tokens };
        let paired = BlocksStored { tokens: vec![1, 2, 3, 4, 5], is_paired: true, ..stored(hash) };
        assert_eq!(recognize(&paired, &[]), Some(Some(keys)));
        assert_eq!(recognize(&stored(hash), &[]), Some(None));
        let (_, plain) = first_key(KeyKind::Sglang);
        assert_eq!(recognize(&BlocksStored { hashes: vec![EngineHash(plain)], ..paired }, &[]), Some(None));
    }

    #[test]
    fn an_unknown_seed_is_no_known_chain() {
        assert_eq!(recognize(&stored(42), &[]), Some(None));
    }

    #[test]
    fn an_event_that_proves_nothing_decides_nothing() {
        let (_, hash) = first_key(KeyKind::Sglang);
        let cases = [
            BlocksStored { parent: Some(EngineHash(1)), ..stored(hash) },
            BlocksStored { lora_name: Some("a".to_owned()), ..stored(hash) },
            BlocksStored { salt: Some("a".to_owned()), ..stored(hash) },
            BlocksStored { tokens: Vec::new(), ..stored(hash) },
            BlocksStored { block_tokens: 0, ..stored(hash) },
            BlocksStored { hashes: Vec::new(), ..stored(hash) },
        ];
        for event in cases {
            assert_eq!(recognize(&event, &[]), None, "{event:?}");
        }
    }
}
