//! Many threads at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvik_store::{Clear, Store};
use kvik_tier::conformance::MapTier;
use kvik_tier::{Checksummed, FaultRates, Faulty, Tier, TierKind};

use crate::observer::Replay;
use crate::support::*;

const N_THREADS: u32 = 8;

/// Lets a thread do random operations; returns the number of chunks that it retrieved.
fn work(store: &Store, seed: u64, n_rounds: u32) -> u64 {
    let mut state = seed;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let space = space_of(store, "", 2);
    let mut held = Vec::new();
    let mut n_hits = 0;
    for _ in 0..n_rounds {
        let mut tokens = tokens_of(0, 8);
        tokens.extend(tokens_of(1 + draw(6) as u32, 16));
        let chain = space.chain(&tokens);
        match draw(20) {
            0..8 => n_hits += retrieve_all(store, &chain) as u64,
            8..14 => {
                store_chain(store, &chain);
            }
            14 => drop(store.prefetch(&chain, 0)),
            15 => {
                let mut reader = store.retrieve_layers(&chain, 0);
                while let Some(layer) = reader.next_layer() {
                    for chunk_idx in 0..layer.n_chunks() {
                        let payload = content(chain.key(chunk_idx, 0).unwrap(), PAYLOAD_BYTES);
                        let start = layer.idx() * SECTION_BYTES;
                        assert!(layer.section(chunk_idx, 0) == &payload[start..start + SECTION_BYTES]);
                    }
                }
            }
            16 => {
                store.pin(&chain);
                store.unpin(&chain);
            }
            17 => held.push((store.retrieve(&chain, 0), chain)),
            18 => held.clear(),
            _ if draw(8) == 0 => {
                store.clear(&Clear::default());
            }
            _ => {
                store.relocate(&chain, TierKind::Ram, TierKind::Nvme, draw(2) == 0);
            }
        }
        if held.len() > 1 {
            held.remove(0);
        }
        for (retrieved, chain) in &held {
            verify(retrieved, chain, 0);
        }
    }
    n_hits
}

#[test]
fn eight_threads_never_see_a_wrong_byte_and_leave_nothing_behind() {
    let rates = FaultRates { fail: 20, lose: 20, flip: 20, mix: 20, tear: 20, ..FaultRates::default() };
    let disk = Faulty::new(MapTier::with_capacity_bytes(40 << 13), rates.clone(), 1);
    let nvme: Arc<dyn Tier> = Arc::new(Kind(TierKind::Nvme, Checksummed::new(disk)));
    let redis: Arc<dyn Tier> =
        Arc::new(Kind(TierKind::Redis, Checksummed::new(Faulty::new(MapTier::new(), rates, 2))));
    // Fewer slots than there are payloads: 26 chunks of 2 ranks.
    let store = Setup::new(44)
        .with(|options| {
            options.ram_free_share = 0.1;
            options.batch_bytes = 4 * PAYLOAD_BYTES as u64;
        })
        .local_dyn(nvme)
        .remote_dyn(redis)
        .open();
    let space = space_of(&store, "", 2);
    let replay = Replay::start(&store, &space);
    let n_hits = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..N_THREADS {
            let (store, n_hits) = (&store, &n_hits);
            scope.spawn(move || n_hits.fetch_add(work(store, u64::from(thread) + 1, 250), Ordering::Relaxed));
        }
    });
    let stats = store.stats();
    assert!(n_hits.load(Ordering::Relaxed) > 500, "{stats:?}");
    assert!(stats.evicted_chunks[..2].iter().all(|(_, n_evicted)| *n_evicted > 0), "{stats:?}");
    let _ = store.flush(Duration::from_secs(30));
    replay.verify(&store, &space);
    store.clear(&Clear::default());
    until("all memory is free", || store.health()[0].1.used_bytes == Some(0));
    assert_eq!(store.stats().n_entries, 0);
    replay.verify(&store, &space);
}
