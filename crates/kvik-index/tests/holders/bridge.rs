//! The bridge from an engine's keys to ours, for every ratio of block sizes.

use std::collections::{HashMap, HashSet};

use kvik_index::holders::{BlockKey, Bridge, BridgeConfig, BridgeEvent, OwnChain, OwnRun, Tier};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::support::{Random, keys};

/// Blocks of so many tokens, hashed one after the other.
struct Chain(usize);

impl OwnChain for Chain {
    fn block_tokens(&self) -> usize {
        self.0
    }

    fn key(&self, parent: Option<BlockKey>, tokens: &[u32]) -> BlockKey {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        BlockKey(xxh3_64_with_seed(&bytes, parent.map_or(1, |parent| parent.0)))
    }
}

fn own_keys(chain: &Chain, tokens: &[u32]) -> Vec<BlockKey> {
    let mut parent = None;
    tokens
        .chunks_exact(chain.0)
        .map(|block| {
            parent = Some(chain.key(parent, block));
            parent.unwrap()
        })
        .collect()
}

/// A prompt's tokens and the keys of an engine with blocks of `block_tokens`.
fn prompt(number: u32, n_tokens: usize, block_tokens: usize) -> (Vec<u32>, Vec<BlockKey>) {
    let tokens: Vec<u32> =
        (0..n_tokens as u32).map(|at| if at < 32 { at } else { number << 16 | at }).collect();
    let engine = own_keys(&Chain(block_tokens), &tokens).iter().map(|key| BlockKey(!key.0)).collect();
    (tokens, engine)
}

/// Applies translated events as the index does.
#[derive(Default)]
struct Held(HashMap<Tier, HashMap<BlockKey, u32>>);

impl Held {
    fn apply(&mut self, runs: &[OwnRun]) {
        for run in runs {
            match run {
                OwnRun::Stored { tier, keys } => {
                    let held = self.0.entry(*tier).or_default();
                    for key in keys {
                        *held.entry(*key).or_default() += 1;
                    }
                }
                OwnRun::Removed { tier, keys } => {
                    for key in keys {
                        let held = self.0.entry(*tier).or_default();
                        let count = held.get_mut(key).expect("only what was stored is removed");
                        *count -= 1;
                        if *count == 0 {
                            held.remove(key);
                        }
                    }
                }
                OwnRun::Cleared { tier } => self.0.retain(|held, _| tier.is_some_and(|tier| tier != *held)),
            }
        }
    }

    fn keys(&self, tier: Tier) -> HashSet<BlockKey> {
        self.0.get(&tier).map(|held| held.keys().copied().collect()).unwrap_or_default()
    }
}

#[test]
fn our_blocks_are_there_exactly_while_the_engine_has_all_they_overlap() {
    for (engine_tokens, own_tokens) in [(16, 16), (16, 64), (64, 16), (8, 16), (48, 16), (16, 24)] {
        let chain = Chain(own_tokens);
        let mut bridge = Bridge::new(BridgeConfig::default());
        let mut held = Held::default();
        let mut random = Random(own_tokens as u64);
        let mut engine_held: HashMap<(Tier, BlockKey), u32> = HashMap::new();
        let prompts: Vec<_> = (0..3).map(|number| prompt(number, 576, engine_tokens)).collect();
        for _ in 0..400 {
            let (tokens, engine) = &prompts[random.below(3) as usize];
            let tier = Tier::ALL[random.below(2) as usize];
            let from = random.below(engine.len() as u64) as usize;
            let to = (from + 1 + random.below(4) as usize).min(engine.len());
            let mut out = Vec::new();
            let event = match random.below(20) {
                0 => {
                    engine_held.retain(|(at, _), _| *at != tier);
                    BridgeEvent::Cleared { tier: Some(tier) }
                }
                1..8 => {
                    for key in &engine[from..to] {
                        let count = engine_held.entry((tier, *key)).or_default();
                        *count = count.saturating_sub(1);
                    }
                    BridgeEvent::Removed { tier, keys: &engine[from..to] }
                }
                _ => {
                    // From the start, so that no event waits for its parent here.
                    let keys = &engine[..to];
                    for key in keys {
                        *engine_held.entry((tier, *key)).or_default() += 1;
                    }
                    let tokens = &tokens[..to * engine_tokens];
                    BridgeEvent::Stored { tier, parent: None, keys, tokens, block_tokens: engine_tokens }
                }
            };
            bridge.translate(&event, &chain, &mut out);
            held.apply(&out);
            for tier in Tier::ALL {
                let mut expected = HashSet::new();
                for (tokens, engine) in &prompts {
                    for (at, own) in own_keys(&chain, tokens).into_iter().enumerate() {
                        let first = at * own_tokens / engine_tokens;
                        let last = ((at + 1) * own_tokens - 1) / engine_tokens;
                        let has = |key| engine_held.get(&(tier, key)).is_some_and(|count| *count > 0);
                        if (first..=last).all(|part| engine.get(part).is_some_and(|key| has(*key))) {
                            expected.insert(own);
                        }
                    }
                }
                assert_eq!(held.keys(tier), expected, "{engine_tokens} to {own_tokens} in {tier:?}");
            }
        }
    }
}

#[test]
fn children_wait_for_their_parent_and_forget_what_was_removed_meanwhile() {
    let chain = Chain(16);
    let (tokens, engine) = prompt(1, 128, 16);
    let own = own_keys(&chain, &tokens);
    let mut bridge = Bridge::new(BridgeConfig::default());
    let (mut out, tier) = (Vec::new(), Tier::Gpu);
    let part = |from: usize, to: usize, parent| BridgeEvent::Stored {
        tier,
        parent,
        keys: &engine[from..to],
        tokens: &tokens[from * 16..to * 16],
        block_tokens: 16,
    };
    bridge.translate(&part(6, 8, Some(engine[5])), &chain, &mut out);
    bridge.translate(&part(4, 6, Some(engine[3])), &chain, &mut out);
    bridge.translate(&BridgeEvent::Removed { tier, keys: &engine[6..7] }, &chain, &mut out);
    assert_eq!((out.len(), bridge.n_pending()), (0, 2));
    bridge.translate(&part(0, 4, None), &chain, &mut out);
    assert_eq!(bridge.n_pending(), 0);
    let mut held = Held::default();
    held.apply(&out);
    let expected = own.iter().enumerate().filter(|(at, _)| *at != 6).map(|(_, key)| *key).collect();
    assert_eq!(held.keys(tier), expected);
    assert_eq!(bridge.own_keys(engine[7]), &own[7..8]);
}

#[test]
fn the_park_and_the_memory_of_a_bridge_are_bounded() {
    let chain = Chain(16);
    let config = BridgeConfig { max_blocks: 100, max_pending_bytes: 10_000 };
    let mut bridge = Bridge::new(config);
    let mut out = Vec::new();
    let tokens: Vec<u32> = (0..16).collect();
    for number in 0..10_000_u64 {
        let keys = keys([number]);
        let parent = Some(BlockKey(1 << 40 | number));
        let event =
            BridgeEvent::Stored { tier: Tier::Gpu, parent, keys: &keys, tokens: &tokens, block_tokens: 16 };
        bridge.translate(&event, &chain, &mut out);
    }
    assert!(bridge.n_pending() < 100);
    assert_eq!(bridge.counters().pending_dropped + bridge.n_pending() as u64, 10_000);
    let mut held = Held::default();
    for number in 0..1000_u32 {
        let (tokens, engine) = prompt(number + 1, 64, 16);
        let event = BridgeEvent::Stored {
            tier: Tier::Gpu,
            parent: None,
            keys: &engine,
            tokens: &tokens,
            block_tokens: 16,
        };
        bridge.translate(&event, &chain, &mut out);
        assert!(bridge.n_blocks() <= 100);
    }
    held.apply(&out);
    // What the bridge forgot, it took back: nothing stays that could never be removed.
    assert!(held.keys(Tier::Gpu).len() <= 100);
    assert!(bridge.counters().blocks_forgotten > 1000);
}

#[test]
fn tokens_that_do_not_fit_their_keys_are_refused() {
    let mut bridge = Bridge::new(BridgeConfig::default());
    let mut out = Vec::new();
    let keys = keys([1, 2]);
    for (tokens, block_tokens) in [(&[1_u32, 2, 3][..], 2), (&[1][..], 0), (&[1, 2][..], usize::MAX)] {
        let event = BridgeEvent::Stored { tier: Tier::Gpu, parent: None, keys: &keys, tokens, block_tokens };
        bridge.translate(&event, &Chain(16), &mut out);
    }
    assert_eq!((out.len(), bridge.counters().events_malformed), (0, 3));
}
