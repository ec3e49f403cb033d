use std::collections::BTreeSet;
use std::time::Duration;

use kvik_proto::kv_stream::{ALIVE_INTERVAL, FrameDecoder};
use kvik_types::BlockHash;
use proptest::prelude::*;

use super::*;

const BLOCKS: u32 = 0;

/// What a listener knows.
#[derive(Debug, Default)]
struct Replica {
    decoder: FrameDecoder,
    hellos: Vec<Hello>,
    held: BTreeSet<(u32, KvTier, KvKey)>,
    /// Blocks of a snapshot that has not ended.
    parts: BTreeSet<(u32, KvTier, KvKey)>,
    next_sequence: Option<u64>,
    n_snapshots: usize,
    n_alive: usize,
}

impl Replica {
    /// Takes frames; none may say what was so before.
    fn take(&mut self, bytes: &[u8]) {
        self.decoder.push(bytes);
        while let Some(frame) = self.decoder.next_frame().unwrap() {
            match frame {
                Frame::Hello(hello) => {
                    self.next_sequence = hello.resumes_at;
                    self.hellos.push(hello);
                }
                Frame::SnapshotPart(part) => {
                    for key in part.keys {
                        assert!(self.parts.insert((part.group, part.tier, key)));
                    }
                }
                Frame::SnapshotEnd { next_sequence } => {
                    self.held = std::mem::take(&mut self.parts);
                    self.next_sequence = Some(next_sequence);
                    self.n_snapshots += 1;
                }
                Frame::Batch(batch) => {
                    assert_eq!(Some(batch.sequence), self.next_sequence);
                    assert!(!batch.changes.is_empty());
                    self.next_sequence = Some(batch.sequence + 1);
                    for change in batch.changes {
                        self.apply(change);
                    }
                }
                Frame::Alive { next_sequence } => {
                    assert_eq!(Some(next_sequence), self.next_sequence);
                    self.n_alive += 1;
                }
            }
        }
    }

    fn apply(&mut self, change: KvChange) {
        match change {
            KvChange::Stored { group, tier, keys, .. } => {
                for key in keys {
                    assert!(self.held.insert((group, tier, key)));
                }
            }
            KvChange::Removed { group, tier, keys } => {
                for key in keys {
                    assert!(self.held.remove(&(group, tier, key)));
                }
            }
            KvChange::Cleared { .. } => panic!("the log does not clear"),
        }
    }

    /// Reads until it is at the number `next_sequence`.
    async fn follow(&mut self, listener: &mut KvListener, next_sequence: u64) {
        while self.next_sequence != Some(next_sequence) {
            self.take(&listener.next().await.unwrap());
        }
    }
}

fn log_of(kept_bytes: usize) -> Arc<KvLog> {
    Arc::new(KvLog::new("w".to_owned(), 9, "m".to_owned(), Vec::new(), kept_bytes))
}

fn change(key: u64, is_held: bool) -> HeldChange {
    HeldChange { key: KvKey(key), parent: None, tier: KvTier::Gpu, is_held }
}

fn next_of(log: &KvLog) -> u64 {
    log.state.lock().next_sequence
}

#[derive(Debug, Clone)]
enum Operation {
    Append(Vec<(u32, u64, usize, bool)>),
    Listen,
    Resume,
    Read,
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let changes = prop::collection::vec((0..2_u32, 0..40_u64, 0..KvTier::ALL.len(), any::<bool>()), 0..12);
    let operation = prop_oneof![
        6 => changes.prop_map(Operation::Append),
        1 => Just(Operation::Listen),
        1 => Just(Operation::Resume),
        2 => Just(Operation::Read),
    ];
    prop::collection::vec(operation, 1..60)
}

proptest! {
    #[test]
    fn every_listener_knows_what_is_held_however_slowly_it_reads(
        operations in operations(),
        kept_bytes in 0..2000_usize,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let log = log_of(kept_bytes);
        let mut truth: BTreeSet<(u32, KvTier, KvKey)> = BTreeSet::new();
        let mut listeners = vec![(log.listen(None).unwrap(), Replica::default())];
        for operation in operations {
            match operation {
                Operation::Append(changes) => {
                    for (group, key, tier, is_held) in changes {
                        let (key, tier) = (KvKey(key), KvTier::ALL[tier]);
                        let one = HeldChange { key, parent: None, tier, is_held };
                        log.append(group, std::iter::once(one));
                        if is_held {
                            truth.insert((group, tier, key));
                        } else {
                            truth.remove(&(group, tier, key));
                        }
                    }
                }
                Operation::Listen => listeners.push((log.listen(None).unwrap(), Replica::default())),
                Operation::Resume => {
                    let (_, replica) = listeners.pop().unwrap();
                    let resume = replica.next_sequence.map(|sequence| (9, sequence));
                    // What was read of a snapshot that did not end is worth nothing.
                    let replica = Replica { held: replica.held, ..Replica::default() };
                    listeners.push((log.listen(resume).unwrap(), replica));
                }
                Operation::Read => {
                    let (listener, replica) = listeners.last_mut().unwrap();
                    if replica.next_sequence != Some(next_of(&log)) {
                        replica.take(&runtime.block_on(listener.next()).unwrap());
                    }
                }
            }
            prop_assert!(log.state.lock().batch_bytes <= kept_bytes);
        }
        for (mut listener, mut replica) in listeners {
            runtime.block_on(replica.follow(&mut listener, next_of(&log)));
            prop_assert_eq!(&replica.held, &truth);
        }
    }
}

#[tokio::test]
async fn a_listener_goes_on_where_it_was_in_the_same_epoch_only() {
    let log = log_of(KEPT_BYTES);
    log.append(BLOCKS, [change(1, true), change(2, true)].into_iter());
    log.append(BLOCKS, std::iter::once(change(1, false)));
    for (resume, resumes_at) in [
        (None, None),
        (Some((9, 1)), Some(1)),
        (Some((9, 2)), Some(2)),
        (Some((9, 3)), None),
        (Some((8, 1)), None),
    ] {
        let mut listener = log.listen(resume).unwrap();
        // What was held before the batch that is due.
        let keys: &[u64] = if resumes_at == Some(1) { &[1, 2] } else { &[2] };
        let held = keys.iter().map(|key| (BLOCKS, KvTier::Gpu, KvKey(*key))).collect();
        let mut replica = Replica { held, ..Replica::default() };
        replica.take(&listener.next().await.unwrap());
        assert_eq!(replica.hellos[0].resumes_at, resumes_at, "{resume:?}");
        replica.follow(&mut listener, 2).await;
        assert_eq!(replica.n_snapshots, usize::from(resumes_at.is_none()));
        assert_eq!(replica.held, BTreeSet::from([(BLOCKS, KvTier::Gpu, KvKey(2))]));
    }
}

#[tokio::test]
async fn a_listener_that_falls_behind_gets_a_snapshot_and_the_log_stays_small() {
    let log = log_of(1000);
    let mut listener = log.listen(None).unwrap();
    let mut replica = Replica::default();
    replica.follow(&mut listener, 0).await;
    for key in 0..10_000 {
        log.append(BLOCKS, std::iter::once(change(key, true)));
    }
    assert!(log.state.lock().batch_bytes <= 1000);
    replica.follow(&mut listener, 10_000).await;
    assert_eq!((replica.n_snapshots, replica.hellos.len()), (2, 1));
    assert_eq!(replica.held.len(), 10_000);
}

#[tokio::test]
async fn what_changes_while_a_snapshot_is_read_comes_after_it() {
    let log = log_of(KEPT_BYTES);
    log.append(BLOCKS, (0..50_000).map(|key| change(key, true)));
    let mut listener = log.listen(None).unwrap();
    let mut replica = Replica::default();
    replica.take(&listener.next().await.unwrap());
    replica.take(&listener.next().await.unwrap());
    assert!(!replica.parts.is_empty() && replica.n_snapshots == 0);
    log.append(BLOCKS, (0..50_000).filter(|key| key % 2 == 0).map(|key| change(key, false)));
    replica.follow(&mut listener, next_of(&log)).await;
    assert_eq!(replica.n_snapshots, 1);
    assert_eq!(replica.held.len(), 25_000);
}

#[tokio::test]
async fn many_changes_are_cut_into_batches_and_chains_into_runs() {
    let log = log_of(KEPT_BYTES);
    let of_chain = |key| HeldChange { parent: Some(KvKey(key - 1)), ..change(key, true) };
    log.append(BLOCKS, (1..=MAX_FRAME_KEYS as u64 + 1).map(of_chain));
    assert_eq!(next_of(&log), 2);
    log.append(BLOCKS, [change(1, false), change(1, true), change(1, true)].into_iter());
    assert_eq!(next_of(&log), 3);
    log.append(BLOCKS, std::iter::once(change(1, true)));
    assert_eq!(next_of(&log), 3, "nothing has changed");
    let mut listener = log.listen(Some((9, 0))).unwrap();
    let mut decoder = FrameDecoder::default();
    let mut runs = Vec::new();
    while runs.len() < 3 {
        decoder.push(&listener.next().await.unwrap());
        while let Some(frame) = decoder.next_frame().unwrap() {
            if let Frame::Batch(batch) = frame {
                runs.push(batch.changes.iter().map(|change| change.keys().len()).collect::<Vec<_>>());
            }
        }
    }
    assert_eq!(runs, [vec![MAX_FRAME_KEYS], vec![1], vec![1, 1]]);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_log_says_that_it_lives_and_a_change_wakes_at_once() {
    let log = log_of(KEPT_BYTES);
    let mut listener = log.listen(None).unwrap();
    let mut replica = Replica::default();
    replica.follow(&mut listener, 0).await;
    let started = tokio::time::Instant::now();
    replica.take(&listener.next().await.unwrap());
    assert_eq!((replica.n_alive, started.elapsed()), (1, ALIVE_INTERVAL));
    let appending = Arc::clone(&log);
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        appending.append(BLOCKS, std::iter::once(change(1, true)));
    });
    replica.follow(&mut listener, 1).await;
    assert_eq!((replica.n_alive, started.elapsed()), (1, ALIVE_INTERVAL + Duration::from_millis(100)));
}

#[tokio::test(start_paused = true)]
async fn a_group_that_comes_later_ends_streams_and_is_named_to_those_that_come_back() {
    let log = log_of(KEPT_BYTES);
    let chunk = |key: u64| HeldChange { tier: KvTier::Cpu, ..change(key, true) };
    log.append(BLOCKS, std::iter::once(change(1, true)));
    let mut waiting = log.listen(None).unwrap();
    let mut replica = Replica::default();
    replica.follow(&mut waiting, 1).await;
    let (slow, adding) = (log.listen(None).unwrap(), Arc::clone(&log));
    let n_before = log.n_groups();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        adding.add_group(BlockGroup { number: 7, block_tokens: 256, root: BlockHash([7; 16]) });
        adding.append(7, std::iter::once(chunk(2)));
    });
    let started = tokio::time::Instant::now();
    assert!(waiting.next().await.is_none(), "it hears nothing of a group that it does not know");
    assert_eq!(started.elapsed(), Duration::from_millis(100), "at once");
    let mut slow = slow;
    assert!(slow.next().await.is_none());
    assert!(log.has_group(7));
    // It goes on from where it was, or from the start; either is told of the group.
    for resume in [Some((log.epoch(), 1)), None] {
        let (mut again, mut replica) = (log.listen(resume).unwrap(), Replica::default());
        replica.follow(&mut again, 2).await;
        assert_eq!(replica.hellos[0].groups.len(), n_before + 1);
        assert!(replica.held.contains(&(7, KvTier::Cpu, KvKey(2))));
    }
}

#[test]
fn there_are_only_so_many_listeners() {
    let log = log_of(KEPT_BYTES);
    let mut listeners: Vec<KvListener> = (0..MAX_LISTENERS).map(|_| log.listen(None).unwrap()).collect();
    assert!(log.listen(None).is_none());
    listeners.pop();
    assert!(log.listen(None).is_some());
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_log_ends_streams_at_once_also_those_that_begin_later() {
    let log = log_of(KEPT_BYTES);
    let mut waiting = log.listen(None).unwrap();
    Replica::default().follow(&mut waiting, 0).await;
    let ending = Arc::clone(&log);
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        ending.end();
    });
    let started = tokio::time::Instant::now();
    assert!(waiting.next().await.is_none());
    assert_eq!(started.elapsed(), Duration::from_millis(100));
    assert!(log.listen(None).unwrap().next().await.is_none());
}
