//! A worker of kvik, which numbers what it says and can be asked for all of it.
//!
//! One task follows one worker. It reads the worker's [`kv_stream`](kvik_proto::kv_stream) and hands it to
//! one feed for each group of blocks that the worker has: token blocks in its engine, chunks in its store.
//! They have the name of the worker and differ in their naming, so they are two books. Every batch goes to
//! every feed with the changes of its group, also where there are none, so that all count alike.
//!
//! Whatever goes wrong, the task connects again after a pause and asks for what is due. What the worker
//! cannot give any more comes as a snapshot; where the feeds say that something is missing, a snapshot is
//! asked for.

mod metrics;

use std::sync::Arc;
use std::time::Duration;

use kvik_index::holders::{BlockKey, Tier, Verdict};
use kvik_proto::client::{ClientError, KvStream, WorkerClient};
use kvik_proto::events::{BlocksRemoved, BlocksStored, EngineHash, KvEvent, Medium};
use kvik_proto::kv_stream::{ALIVE_INTERVAL, BlockGroup, Frame, Hello, KvBatch, KvChange, KvKey, KvTier};
use tokio_util::sync::CancellationToken;

use self::metrics::Tallies;
use crate::error::IndexerError;
use crate::feed::{Feed, FeedBatch, FeedName, Feeds, Holding, Naming};
use crate::sources::pause::Pauses;

/// Silence after which a connection is taken for broken.
const LONGEST_SILENCE: Duration = ALIVE_INTERVAL.saturating_mul(5);
/// Pause after the first failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause: a worker that comes back is known again soon, one that stays away costs nothing.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Most pairs of block and tier of one snapshot, which is kept in memory until it is whole: half a gigabyte.
const MAX_SNAPSHOT_BLOCKS: usize = 64 << 20;
/// Most groups of blocks of a worker, which has two; each is a source of its own to the index.
const MAX_GROUPS: usize = 8;
/// Times in a row that the feeds may know a later epoch than the worker names before they are begun anew.
/// Once can be a connection to the life before; the worker itself again is a clock that was set back.
const MAX_OLD_EPOCHS: u32 = 2;

/// The worker to be followed, as the membership knows it.
#[derive(Debug, Clone)]
pub struct FollowedWorker {
    /// Where it is, such as `http://host:8082`.
    pub address: String,
    /// Its id; a process that answers under another id is ignored.
    pub worker: String,
    /// The model that it serves.
    pub model: String,
    /// The model by which a store daemon knows its chunks, where the address is that of a daemon which keeps KV for the
    /// worker; `None` for a worker that reports its own.
    pub store_model: Option<String>,
}

impl FollowedWorker {
    /// What metrics call it: a worker of another kind reports its own KV beside the store, under its name.
    fn label(&self) -> String {
        let suffix = if self.store_model.is_some() { " store" } else { "" };
        format!("{}{suffix}", self.worker)
    }
}

/// Why a connection was given up.
#[derive(Debug, thiserror::Error)]
enum Break {
    #[error("the worker has left")]
    Left,
    #[error("the worker ended the stream")]
    Ended,
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("nothing was heard for {} s", LONGEST_SILENCE.as_secs())]
    Silence,
    #[error("worker `{worker}` with model `{model}` answers instead")]
    Stranger { worker: String, model: String },
    #[error("a frame that does not belong here: {0}")]
    Unexpected(&'static str),
    #[error("a snapshot of more than {MAX_SNAPSHOT_BLOCKS} blocks")]
    TooLarge,
    #[error("what the index knows of the worker has a gap; it is asked for a snapshot")]
    Incomplete,
    #[error("the index has forgotten the worker")]
    Forgotten,
    #[error("the index knows a later epoch than {epoch}")]
    OldEpoch { epoch: u64 },
    #[error(transparent)]
    Feed(#[from] IndexerError),
}

/// The state of the task.
struct Follower {
    client: WorkerClient,
    followed: FollowedWorker,
    feeds: Arc<dyn Feeds>,
    left: CancellationToken,
    /// One for each group that the worker named last.
    open: Vec<GroupFeed>,
    wants_snapshot: bool,
    n_old_epochs: u32,
    /// The epoch that the worker named last.
    epoch: Option<u64>,
    pauses: Pauses,
    tallies: Tallies,
}

#[derive(Debug)]
struct GroupFeed {
    group: BlockGroup,
    feed: Arc<dyn Feed>,
}

/// A snapshot that is being read.
#[derive(Debug, Default)]
struct Draft {
    runs: Vec<(u32, KvTier, Vec<KvKey>)>,
    n_blocks: usize,
}

/// Follows a worker, which `client` asks, until `left` says that it is gone; then nothing of it is found any more.
///
/// Nothing ends it before: a worker that cannot be reached is tried again.
pub async fn follow_worker(
    client: WorkerClient,
    followed: FollowedWorker,
    feeds: Arc<dyn Feeds>,
    left: CancellationToken,
) {
    let mut follower = Follower {
        client,
        tallies: Tallies::new(&followed.label()),
        followed,
        feeds,
        left,
        open: Vec::new(),
        wants_snapshot: false,
        n_old_epochs: 0,
        epoch: None,
        pauses: Pauses::new(FIRST_PAUSE, LONGEST_PAUSE),
    };
    follower.run().await;
    follower.close().await;
}

impl Follower {
    async fn run(&mut self) {
        loop {
            let Err(reason) = self.listen().await;
            self.tallies.set_connected(false);
            if matches!(reason, Break::Left) {
                return;
            }
            let FollowedWorker { worker, address, .. } = &self.followed;
            // A worker that drains ends its stream; and of several failures in a row only the first is logged.
            if self.pauses.is_first() && !matches!(reason, Break::Ended) {
                tracing::warn!(%worker, %address, %reason, "stopped listening to a worker; it is tried again");
            } else {
                tracing::debug!(%worker, %address, %reason, "stopped listening to a worker; it is tried again");
            }
            match reason {
                Break::Incomplete | Break::Unexpected(_) => self.wants_snapshot = true,
                Break::Forgotten => self.close().await,
                // A worker that is away leaves the membership; a daemon is in none, and what its memory had is gone with it.
                Break::Client(ClientError::Unreachable { .. }) if self.followed.store_model.is_some() => {
                    self.close().await;
                }
                Break::OldEpoch { .. } => {
                    self.n_old_epochs += 1;
                    if self.n_old_epochs >= MAX_OLD_EPOCHS {
                        self.close().await;
                    }
                }
                _ => {}
            }
            tokio::select! {
                () = self.left.cancelled() => return,
                () = tokio::time::sleep(self.pauses.after_failure()) => {}
            }
        }
    }

    /// Listens as long as all goes well.
    async fn listen(&mut self) -> Result<std::convert::Infallible, Break> {
        let resume = self.position().await?;
        let mut stream = tokio::select! {
            () = self.left.cancelled() => return Err(Break::Left),
            stream = self.open_stream(resume) => stream?,
        };
        let Frame::Hello(hello) = self.next_frame(&mut stream).await? else {
            return Err(Break::Unexpected("the first is no hello"));
        };
        self.greet(&hello, resume).await?;
        let epoch = hello.epoch;
        self.note_connection(epoch);
        let mut draft = hello.resumes_at.is_none().then(Draft::default);
        loop {
            match (self.next_frame(&mut stream).await?, &mut draft) {
                (Frame::SnapshotPart(part), draft) => {
                    let draft = draft.get_or_insert_default();
                    draft.n_blocks += part.keys.len();
                    if draft.n_blocks > MAX_SNAPSHOT_BLOCKS {
                        return Err(Break::TooLarge);
                    }
                    draft.runs.push((part.group, part.tier, part.keys));
                }
                (Frame::SnapshotEnd { next_sequence }, draft) => {
                    // Also without a part before it: the worker holds nothing.
                    self.replace(epoch, next_sequence, draft.take().unwrap_or_default()).await?;
                }
                (Frame::Batch(batch), None) => self.apply(epoch, &batch).await?,
                (Frame::Alive { .. }, None) => {}
                (Frame::Batch(_) | Frame::Alive { .. }, Some(_)) => {
                    return Err(Break::Unexpected("a snapshot without its end"));
                }
                (Frame::Hello(_), _) => return Err(Break::Unexpected("a second hello")),
            }
            if draft.is_none() {
                self.pauses.reset();
                self.n_old_epochs = 0;
            }
        }
    }

    async fn open_stream(&self, resume: Option<(u64, u64)>) -> Result<KvStream, ClientError> {
        match &self.followed.store_model {
            None => self.client.kv_events(resume).await,
            Some(model) => self.client.store_events(model, resume).await,
        }
    }

    /// What is due: the epoch and number that all feeds can go on from.
    async fn position(&self) -> Result<Option<(u64, u64)>, Break> {
        if self.wants_snapshot {
            return Ok(None);
        }
        let mut due: Option<(u64, u64)> = None;
        for GroupFeed { feed, .. } in &self.open {
            let (Some(epoch), Some(sequence)) = feed.position().await? else { return Ok(None) };
            due = match due {
                None => Some((epoch, sequence)),
                // To a feed that is ahead, a repeated batch is a duplicate.
                Some((of, before)) if of == epoch => Some((of, before.min(sequence))),
                Some(_) => return Ok(None),
            };
        }
        Ok(due)
    }

    async fn next_frame(&self, stream: &mut KvStream) -> Result<Frame, Break> {
        tokio::select! {
            biased;
            () = self.left.cancelled() => Err(Break::Left),
            frame = tokio::time::timeout(LONGEST_SILENCE, stream.next()) => match frame {
                Err(_) => Err(Break::Silence),
                Ok(frame) => frame?.ok_or(Break::Ended),
            },
        }
    }

    fn note_connection(&mut self, epoch: u64) {
        self.tallies.set_connected(true);
        self.tallies.connections.increment(1);
        if self.epoch.replace(epoch).is_some_and(|before| before != epoch) {
            self.tallies.restarts.increment(1);
        }
    }

    /// Checks the worker's identity and opens its feeds.
    async fn greet(&mut self, hello: &Hello, resume: Option<(u64, u64)>) -> Result<(), Break> {
        let Hello { groups, .. } = hello;
        let FollowedWorker { worker, model, store_model, .. } = &self.followed;
        // A daemon was asked for a model and names its chunks by what decides their KV; it serves no requests.
        let is_other = store_model.is_none() && (hello.worker != *worker || hello.model != *model);
        if is_other {
            return Err(Break::Stranger { worker: hello.worker.clone(), model: hello.model.clone() });
        }
        let name = FeedName { model: model.clone(), worker: worker.clone(), rank: 0 };
        if groups.len() > MAX_GROUPS {
            return Err(Break::Unexpected("a hello with too many groups"));
        }
        if hello.resumes_at.is_some() && resume.is_none_or(|(_, from)| hello.resumes_at != Some(from)) {
            return Err(Break::Unexpected("it goes on from what was not asked for"));
        }
        if self.open.iter().map(|open| &open.group).eq(groups) {
            return Ok(());
        }
        // Another configuration: the keys of the life before mean nothing now.
        self.close().await;
        for group in groups {
            let naming = Naming::Kvik { root: group.root, block_tokens: group.block_tokens };
            let feed = self.feeds.open(name.clone(), naming).await?;
            self.open.push(GroupFeed { group: *group, feed });
        }
        if hello.resumes_at.is_some() { Err(Break::Incomplete) } else { Ok(()) }
    }

    /// Replaces all that is known of the worker.
    async fn replace(&mut self, epoch: u64, next_sequence: u64, draft: Draft) -> Result<(), Break> {
        let mut runs_of: Vec<Vec<(Tier, Vec<BlockKey>)>> = self.open.iter().map(|_| Vec::new()).collect();
        for (group, tier, keys) in draft.runs {
            if let Some(place) = self.open.iter().position(|open| open.group.number == group) {
                runs_of[place].push((tier_of(tier), keys.into_iter().map(|key| BlockKey(key.0)).collect()));
            }
        }
        for (GroupFeed { feed, .. }, runs) in self.open.iter().zip(runs_of) {
            if !feed.replace(Holding { epoch: Some(epoch), next_sequence, runs }).await? {
                return Err(Break::OldEpoch { epoch });
            }
        }
        self.wants_snapshot = false;
        self.tallies.snapshots.increment(1);
        Ok(())
    }

    async fn apply(&mut self, epoch: u64, batch: &KvBatch) -> Result<(), Break> {
        self.tallies.batches.increment(1);
        for GroupFeed { group, feed } in &self.open {
            let batch = FeedBatch {
                epoch: Some(epoch),
                sequence: batch.sequence,
                replayed: false,
                published_s: batch.published_s,
                events: events_of(group, &batch.changes).ok_or(Break::Incomplete)?,
            };
            match feed.apply(batch).await? {
                Verdict::Applied | Verdict::Restarted | Verdict::Duplicate => {}
                Verdict::Gap { .. } => {
                    self.tallies.gaps.increment(1);
                    return Err(Break::Incomplete);
                }
                Verdict::UnknownSource => return Err(Break::Forgotten),
                Verdict::OldEpoch => return Err(Break::OldEpoch { epoch }),
            }
        }
        Ok(())
    }

    /// Forgets the worker.
    async fn close(&mut self) {
        for GroupFeed { feed, .. } in self.open.drain(..) {
            if let Err(error) = feed.close().await {
                tracing::warn!(worker = %self.followed.worker, %error, "failed to forget a worker");
            }
        }
    }
}

/// The changes of one group as events; `None` where no event says that.
fn events_of(group: &BlockGroup, changes: &[KvChange]) -> Option<Vec<KvEvent>> {
    let mut events = Vec::new();
    for change in changes {
        match change {
            KvChange::Stored { group: of, tier, parent, keys } if *of == group.number => {
                events.push(KvEvent::Stored(BlocksStored {
                    hashes: hashes_of(keys),
                    parent: parent.map(|key| EngineHash(key.0)),
                    block_tokens: group.block_tokens,
                    medium: medium_of(*tier),
                    ..BlocksStored::default()
                }));
            }
            KvChange::Removed { group: of, tier, keys } if *of == group.number => {
                events.push(KvEvent::Removed(BlocksRemoved {
                    hashes: hashes_of(keys),
                    medium: medium_of(*tier),
                    group_idx: None,
                }));
            }
            KvChange::Stored { .. } | KvChange::Removed { .. } => {}
            KvChange::Cleared { tier: None } => events.push(KvEvent::Cleared),
            KvChange::Cleared { tier: Some(_) } => return None,
        }
    }
    Some(events)
}

fn hashes_of(keys: &[KvKey]) -> Vec<EngineHash> {
    keys.iter().map(|key| EngineHash(key.0)).collect()
}

fn medium_of(tier: KvTier) -> Medium {
    match tier {
        KvTier::Gpu => Medium::Gpu,
        KvTier::Cpu => Medium::Cpu,
        KvTier::Disk => Medium::Disk,
        KvTier::Remote => Medium::Remote,
    }
}

fn tier_of(tier: KvTier) -> Tier {
    match tier {
        KvTier::Gpu => Tier::Gpu,
        KvTier::Cpu => Tier::Cpu,
        KvTier::Disk => Tier::Disk,
        KvTier::Remote => Tier::Remote,
    }
}
