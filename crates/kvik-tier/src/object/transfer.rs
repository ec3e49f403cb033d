//! Single operations on an object store, bounded in time.

use std::error::Error as _;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::try_join_all;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetRange, GetResultPayload, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions,
    PutPayload,
};
use tokio::time::timeout;

use super::runtime::Reporter;
use crate::error::TierError;
use crate::tier::{GetItem, GetOutcome, PutOutcome};

/// Chunks with more bytes go in several requests.
const MULTIPART_BYTES: usize = 64 << 20;
/// Bytes of one of them; object stores want 5 MiB at least.
const PART_BYTES: usize = 16 << 20;
/// Requests of one chunk at a time.
const N_PARTS_AT_A_TIME: usize = 4;
/// Bytes that are read from a file at a time.
const FILE_PIECE_BYTES: usize = 1 << 20;
/// How often a chunk is sent to a store that does not answer.
const N_TRIES: usize = 3;
/// Time to take back what was sent of a chunk that failed.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);

/// What a read tells its caller.
pub(super) enum ReadMessage {
    /// Bytes and where they belong in the head and the buffer behind it.
    Piece(usize, Bytes),
    /// The read is over.
    End(GetOutcome),
}

/// What is to be read of an object.
#[derive(Clone)]
pub(super) struct Read {
    path: Path,
    /// One range, or that of the head and one further on, in the order in which they are reported.
    ranges: Vec<Range<u64>>,
    is_whole: bool,
}

/// What became of a chunk that was to be stored, and why none can be, if so.
pub(super) type PutEnd = (PutOutcome, Option<String>);

/// Stores a chunk.
pub(super) async fn put(
    store: Arc<dyn ObjectStore>,
    path: Path,
    payload: PutPayload,
    creates: Arc<AtomicBool>,
    budget: Duration,
) -> PutEnd {
    let n_bytes = payload.content_length();
    let result = if n_bytes > MULTIPART_BYTES {
        put_large(&*store, &path, payload, budget).await
    } else {
        in_time(budget, put_until_answered(&*store, &path, payload, &creates)).await
    };
    match result {
        Ok(outcome) => (outcome, None),
        Err(Error::AlreadyExists { .. }) => (PutOutcome::Present, None),
        Err(error) if is_out_of_space(&error) => (PutOutcome::NoRoom, None),
        Err(error) => {
            let read_only = is_write_forbidden(&error).then(|| error.to_string());
            (PutOutcome::Failed(to_tier_error("store a chunk", &error)), read_only)
        }
    }
}

/// Stores a chunk, again if no answer came.
///
/// A store may refuse a chunk that it has before it took all bytes, and close the connection: the refusal is
/// lost with it, and so is whatever was sent next over that connection. Storing twice is harmless here, which
/// the client library cannot know.
async fn put_until_answered(
    store: &dyn ObjectStore,
    path: &Path,
    payload: PutPayload,
    creates: &AtomicBool,
) -> Result<PutOutcome, Error> {
    for _ in 1..N_TRIES {
        match put_small(store, path, payload.clone(), creates).await {
            Err(Error::Generic { .. }) => {}
            result => return result,
        }
        if store.head(path).await.is_ok_and(|meta| meta.size == payload.content_length() as u64) {
            return Ok(PutOutcome::Present);
        }
    }
    put_small(store, path, payload, creates).await
}

async fn put_small(
    store: &dyn ObjectStore,
    path: &Path,
    payload: PutPayload,
    creates: &AtomicBool,
) -> Result<PutOutcome, Error> {
    // Relaxed: it is learned once, and learning it again is harmless.
    if creates.load(Ordering::Relaxed) {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match store.put_opts(path, payload.clone(), options).await {
            Err(Error::NotImplemented { .. } | Error::NotSupported { .. }) => {
                creates.store(false, Ordering::Relaxed);
            }
            result => return result.map(|_| PutOutcome::Stored),
        }
    }
    // Equal keys are equal bytes, so an object that is replaced stays what it was.
    store.put(path, payload).await.map(|_| PutOutcome::Stored)
}

/// Stores a chunk in several requests. It appears with the last one.
async fn put_large(
    store: &dyn ObjectStore,
    path: &Path,
    payload: PutPayload,
    budget: Duration,
) -> Result<PutOutcome, Error> {
    // No store can be told here not to replace what is there.
    match in_time(budget, store.head(path)).await {
        Ok(_) => return Ok(PutOutcome::Present),
        Err(Error::NotFound { .. }) => {}
        Err(error) => return Err(error),
    }
    let mut upload = in_time(budget, store.put_multipart(path)).await?;
    let result = in_time(budget, async {
        let bytes = Bytes::from(payload);
        let starts = (0..bytes.len()).step_by(PART_BYTES);
        let parts: Vec<_> = starts
            .map(|start| upload.put_part(bytes.slice(start..bytes.len().min(start + PART_BYTES)).into()))
            .collect();
        stream::iter(parts).buffer_unordered(N_PARTS_AT_A_TIME).try_collect::<()>().await?;
        upload.complete().await
    })
    .await;
    if result.is_err() {
        // If this fails too, the parts stay until the store's own rules remove them; no reader sees them.
        drop(timeout(ABORT_TIMEOUT, upload.abort()).await);
    }
    result.map(|_| PutOutcome::Stored)
}

impl Read {
    pub(super) fn new(item: &GetItem<'_>, path: Path) -> Self {
        let range_of = |start: u64, n_bytes: usize| start..start.saturating_add(n_bytes as u64);
        let ranges = match item.start_of_one_range() {
            Some(start) => vec![range_of(start, item.n_bytes())],
            None => vec![range_of(0, item.head.len()), range_of(item.offset, item.buffer.len())],
        };
        Self { path, ranges, is_whole: item.is_whole }
    }
}

/// Reads an object, or one or two ranges of it; two at the same time.
pub(super) async fn get(
    store: Arc<dyn ObjectStore>,
    read: Read,
    budget: Duration,
    reporter: Reporter<ReadMessage>,
) {
    let outcome = match in_time(budget, read_ranges(&*store, &read, &reporter)).await {
        Ok(outcome) => outcome,
        Err(Error::NotFound { .. }) => GetOutcome::Miss,
        // Stores refuse a range that begins behind the end, each in its own words.
        Err(error) => match in_time(budget, store.head(&read.path)).await {
            Ok(meta) if read.ranges.iter().any(|range| meta.size < range.end) => {
                GetOutcome::Corrupt("length")
            }
            Err(Error::NotFound { .. }) => GetOutcome::Miss,
            _ => GetOutcome::Failed(to_tier_error("read a chunk", &error)),
        },
    };
    reporter.report(ReadMessage::End(outcome));
}

async fn read_ranges(
    store: &dyn ObjectStore,
    read: &Read,
    reporter: &Reporter<ReadMessage>,
) -> Result<GetOutcome, Error> {
    let mut position = 0;
    let reads: Vec<_> = read
        .ranges
        .iter()
        .map(|range| {
            let report_piece =
                move |start: usize, piece| reporter.report(ReadMessage::Piece(position + start, piece));
            position += range.end.saturating_sub(range.start) as usize;
            read_range(store, &read.path, range.clone(), read.is_whole, report_piece)
        })
        .collect();
    let outcomes = try_join_all(reads).await?;
    Ok(outcomes.into_iter().find(|outcome| !outcome.is_hit()).unwrap_or(GetOutcome::Hit))
}

async fn read_range(
    store: &dyn ObjectStore,
    path: &Path,
    range: Range<u64>,
    is_whole: bool,
    report_piece: impl Fn(usize, Bytes),
) -> Result<GetOutcome, Error> {
    if range.is_empty() && !is_whole {
        // A range without bytes cannot be asked for.
        let meta = store.head(path).await?;
        let is_inside = range.end <= meta.size;
        return Ok(if is_inside { GetOutcome::Hit } else { GetOutcome::Corrupt("length") });
    }
    let bounds = (!is_whole).then(|| GetRange::Bounded(range.clone()));
    let result = store.get_opts(path, GetOptions { range: bounds, ..GetOptions::default() }).await?;
    if result.range != range || (is_whole && result.meta.size != range.end) {
        return Ok(GetOutcome::Corrupt("length"));
    }
    let n_bytes = (range.end - range.start) as usize;
    let n_read = match result.payload {
        GetResultPayload::Stream(mut pieces) => {
            let mut n_read = 0;
            while let Some(piece) = pieces.try_next().await? {
                n_read += piece.len();
                if n_read > n_bytes {
                    return Ok(GetOutcome::Corrupt("length"));
                }
                report_piece(n_read - piece.len(), piece);
            }
            n_read
        }
        GetResultPayload::File(file, _) => {
            let file = Arc::new(file);
            let mut n_read = 0;
            while n_read < n_bytes {
                let piece_bytes = FILE_PIECE_BYTES.min(n_bytes - n_read);
                let (file, start) = (Arc::clone(&file), range.start + n_read as u64);
                let piece = tokio::task::spawn_blocking(move || {
                    let mut piece = vec![0; piece_bytes];
                    file.read_exact_at(&mut piece, start).map(|()| piece)
                })
                .await?
                .map_err(|error| Error::Generic { store: "folder", source: Box::new(error) })?;
                report_piece(n_read, piece.into());
                n_read += piece_bytes;
            }
            n_read
        }
    };
    Ok(if n_read == n_bytes { GetOutcome::Hit } else { GetOutcome::Corrupt("length") })
}

/// Whether an object is there.
pub(super) async fn contains(
    store: Arc<dyn ObjectStore>,
    path: Path,
    budget: Duration,
) -> Result<bool, TierError> {
    match in_time(budget, store.head(&path)).await {
        Ok(_) => Ok(true),
        Err(Error::NotFound { .. }) => Ok(false),
        Err(error) => Err(to_tier_error("ask for a chunk", &error)),
    }
}

/// Removes objects; those that are not there are removed already.
pub(super) async fn delete(
    store: Arc<dyn ObjectStore>,
    paths: Vec<Path>,
    budget: Duration,
) -> Result<(), TierError> {
    let paths = stream::iter(paths.into_iter().map(Ok)).boxed();
    let delete_all = async {
        let mut deleted = store.delete_stream(paths);
        while let Some(result) = deleted.next().await {
            match result {
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    };
    in_time(budget, delete_all).await.map_err(|error| to_tier_error("delete chunks", &error))
}

async fn in_time<T>(budget: Duration, operation: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match timeout(budget, operation).await {
        Ok(result) => result,
        Err(elapsed) => Err(Error::Generic { store: "object store", source: Box::new(elapsed) }),
    }
}

fn to_tier_error(action: &str, error: &Error) -> TierError {
    let is_final = matches!(
        error,
        Error::PermissionDenied { .. }
            | Error::Unauthenticated { .. }
            | Error::InvalidPath { .. }
            | Error::NotFound { .. }
            | Error::NotImplemented { .. }
            | Error::NotSupported { .. }
            | Error::UnknownConfigurationKey { .. }
    );
    TierError::remote(action, error, !is_final)
}

fn is_out_of_space(error: &Error) -> bool {
    let kind = io_error_kind(error);
    matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
}

/// Whether nothing can be written, while reading may work.
fn is_write_forbidden(error: &Error) -> bool {
    let kind = io_error_kind(error);
    matches!(error, Error::PermissionDenied { .. })
        || matches!(kind, Some(io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied))
}

/// What the operating system said, if that is what is behind an error.
fn io_error_kind(error: &Error) -> Option<io::ErrorKind> {
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return Some(error.kind());
        }
        cause = error.source();
    }
    None
}
