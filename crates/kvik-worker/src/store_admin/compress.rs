//! Cold chunks of a tier that are coded again, in the background.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvik_proto::cache::{CompressRequest, CompressStatus};
use kvik_store::{Store, TierName};
use kvik_tier::{ChunkKey, Rewritten, TierKind, is_lossless_codec};
use parking_lot::{Condvar, Mutex};

use crate::error::Refusal;

const DEFAULT_IDLE: Duration = Duration::from_hours(1);

/// Below what one core codes, so that serving has most of it.
const DEFAULT_BYTES_PER_S: u64 = 32 << 20;

/// One run over the cold chunks of a tier; dropping it ends and joins its thread.
#[derive(Debug)]
pub(super) struct Compression {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    status: CompressStatus,
    is_cancelled: bool,
}

/// What a run does.
struct Run {
    store: Store,
    tier: TierName,
    codec: String,
    bytes_per_s: u64,
    chunks: Vec<ChunkKey>,
}

impl Compression {
    /// Checks what is asked for and begins.
    ///
    /// # Errors
    /// If the tier has no codec, the codec is unknown or not allowed, or the operating system gives no thread.
    pub(super) fn start(store: &Store, tier: TierName, request: &CompressRequest) -> Result<Self, Refusal> {
        let Some(tier_codec) = store.codec_of(&tier) else {
            let allowed =
                "a tier with a codec: see `store.nvme_codec`, and `codec` of an entry of `store.tiers`";
            return Err(Refusal::field("tier", &tier, allowed));
        };
        let is_disk = store.tiers().iter().any(|label| label.name == tier && label.kind == TierKind::Nvme);
        if !is_disk {
            return Err(Refusal::field("tier", &tier, "a disk"));
        }
        let codec = request.codec.clone().unwrap_or_else(|| tier_codec.to_owned());
        let is_allowed =
            matches!(is_lossless_codec(&codec), Ok(true)) || store.options().lossy_codecs.contains(&codec);
        if !is_allowed {
            let allowed =
                "none, lossless, or one of fp8, int8, int4 and cachegen that `store.allow_lossy` names";
            return Err(Refusal::field("codec", &codec, allowed));
        }
        let bytes_per_s = request.bytes_per_s.unwrap_or(DEFAULT_BYTES_PER_S);
        if bytes_per_s == 0 {
            return Err(Refusal::field("bytes_per_s", "0", "1 or more"));
        }
        let chunks = store.cold_chunks(&tier, request.idle_s.map_or(DEFAULT_IDLE, Duration::from_secs));
        let status = CompressStatus {
            state: "running".to_owned(),
            tier: tier.to_string(),
            codec: codec.clone(),
            cold_chunks: chunks.len() as u64,
            ..CompressStatus::default()
        };
        let state = Mutex::new(State { status, is_cancelled: false });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        let run = Run { store: store.clone(), tier, codec, bytes_per_s, chunks };
        let running = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("kvik-compress".to_owned())
            .spawn(move || running.run(&run))
            .map_err(|error| Refusal::failed(format!("no thread for the coding of chunks: {error}")))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(super) fn status(&self) -> CompressStatus {
        self.shared.state.lock().status.clone()
    }

    pub(super) fn is_running(&self) -> bool {
        self.shared.state.lock().status.state == "running"
    }

    /// Ends it after the chunk that is being coded.
    pub(super) fn cancel(&self) {
        self.shared.state.lock().is_cancelled = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for Compression {
    fn drop(&mut self) {
        self.cancel();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self, run: &Run) {
        let end = run.chunks.iter().find_map(|key| self.recode(run, *key));
        let (state, reason) = end.unwrap_or(("done", None));
        let mut shared = self.state.lock();
        state.clone_into(&mut shared.status.state);
        shared.status.reason = reason;
        let CompressStatus { tier, codec, recoded_chunks, bytes_before, bytes_after, .. } = &shared.status;
        tracing::info!(
            tier,
            codec,
            recoded_chunks,
            bytes_before,
            bytes_after,
            state,
            "coded cold chunks again"
        );
    }

    /// Codes one chunk and waits as long as its bytes are worth; why the run ends, if it does.
    fn recode(&self, run: &Run, key: ChunkKey) -> Option<(&'static str, Option<String>)> {
        if self.state.lock().is_cancelled {
            return Some(("cancelled", None));
        }
        let rewritten = match run.store.recode(&run.tier, key, &run.codec) {
            Ok(rewritten) => rewritten,
            Err(error) => return Some(("failed", Some(error.to_string()))),
        };
        let mut state = self.state.lock();
        let status = &mut state.status;
        status.seen_chunks += 1;
        match rewritten {
            Rewritten::Changed { n_before_bytes, n_after_bytes } => {
                status.recoded_chunks += 1;
                status.bytes_before += n_before_bytes;
                status.bytes_after += n_after_bytes;
                let pause = Duration::try_from_secs_f64(n_before_bytes as f64 / run.bytes_per_s as f64);
                if !state.is_cancelled {
                    self.changed.wait_for(&mut state, pause.unwrap_or(Duration::MAX));
                }
                None
            }
            Rewritten::Missing | Rewritten::Kept => None,
            Rewritten::NoRoom => Some(("failed", Some("the tier has no room for one more chunk".to_owned()))),
        }
    }
}
