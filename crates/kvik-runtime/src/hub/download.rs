//! One file from the hub into the cache, in as many attempts as it takes.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::time::Duration;

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

use super::cache::RepositoryCache;
use super::client::{FileInfo, HubClient, next_chunk};
use super::error::HubError;
use super::repository::Repository;
use crate::terminal::ProgressLine;

/// Attempts in a row that bring nothing before the hub counts as away.
const MAX_FAILURES: u32 = 5;
/// The wait after the second failure in a row; it doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Bytes that are read at a time for a checksum.
const READ_BYTES: usize = 1 << 20;

/// A file of a repository that is wanted in the cache.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) repository: &'a Repository,
    pub(super) commit: &'a str,
    pub(super) file: &'a str,
    pub(super) info: &'a FileInfo,
}

impl Wanted<'_> {
    /// Bytes that are still to be fetched.
    pub(super) fn missing_bytes(&self, cache: &RepositoryCache) -> u64 {
        if cache.blob(&self.info.etag).is_file() {
            return 0;
        }
        self.info.n_bytes.saturating_sub(length(&cache.incomplete(&self.info.etag)))
    }

    /// Fetches the file unless its content is there, and links it into its snapshot.
    pub(super) async fn fetch(
        &self,
        client: &HubClient,
        cache: &RepositoryCache,
        progress: &mut ProgressLine,
    ) -> Result<(), HubError> {
        let etag = &self.info.etag;
        if !cache.blob(etag).is_file() {
            let lock = cache.lock(etag).await?;
            // Another process may have fetched it meanwhile.
            if !cache.blob(etag).is_file() {
                self.fetch_blob(client, cache, progress).await?;
            }
            drop(lock);
        }
        cache.link(self.commit, self.file, etag)
    }

    /// The caller holds the blob's lock.
    async fn fetch_blob(
        &self,
        client: &HubClient,
        cache: &RepositoryCache,
        progress: &mut ProgressLine,
    ) -> Result<(), HubError> {
        let path = cache.incomplete(&self.info.etag);
        let (mut n_failures, mut pause) = (0, Duration::ZERO);
        loop {
            let before = length(&path);
            match self.fetch_rest(client, &path, progress).await {
                Ok(()) => break,
                Err(HubError::Unavailable { operation, reason }) => {
                    // A connection that brought something is no reason to give up.
                    if before < length(&path) {
                        (n_failures, pause) = (0, Duration::ZERO);
                    }
                    n_failures += 1;
                    if n_failures == MAX_FAILURES {
                        return Err(HubError::Unavailable { operation, reason });
                    }
                    tracing::warn!(
                        file = self.file,
                        reason,
                        "fetching a file was cut short; going on from there"
                    );
                    tokio::time::sleep(pause).await;
                    pause = (2 * pause).max(FIRST_PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
        self.check(&path)?;
        let blob = cache.blob(&self.info.etag);
        fs::rename(&path, &blob).map_err(|source| HubError::io("rename", &path, source, 0))
    }

    /// Appends what is missing of the file.
    async fn fetch_rest(
        &self,
        client: &HubClient,
        path: &Path,
        progress: &mut ProgressLine,
    ) -> Result<(), HubError> {
        let n_bytes = self.info.n_bytes;
        let offset = length(path);
        if offset == n_bytes && path.is_file() {
            return Ok(());
        }
        let failed = |source| HubError::io("write", path, source, n_bytes);
        let mut file = File::options().create(true).append(true).open(path).map_err(failed)?;
        // More than the whole is no part of it.
        let offset = if n_bytes < offset { 0 } else { offset };
        let mut body = client.file_body(self.repository, self.commit, self.file, offset).await?;
        if body.offset < length(path) {
            progress.retract(length(path) - body.offset);
            file.set_len(body.offset).map_err(failed)?;
        }
        let mut at = body.offset;
        while let Some(chunk) = next_chunk(&mut body.response).await? {
            at += chunk.len() as u64;
            if n_bytes < at {
                file.set_len(0).map_err(failed)?;
                let reason = format!("more than the {n_bytes} bytes of {}", self.file);
                return Err(HubError::unavailable("read from the hub", reason));
            }
            file.write_all(&chunk).map_err(failed)?;
            progress.advance(chunk.len() as u64);
        }
        if at < n_bytes {
            let reason = format!("{} ended at {at} of {n_bytes} bytes", self.file);
            return Err(HubError::unavailable("read from the hub", reason));
        }
        file.sync_all().map_err(failed)
    }

    /// Compares the file as it lies on the disk with what the hub says, and removes one that differs.
    fn check(&self, path: &Path) -> Result<(), HubError> {
        let failed = |source| HubError::io("read", path, source, 0);
        let mut context = match self.info.etag.len() {
            64 => Context::new(&SHA256),
            40 => {
                // Git's name of a content.
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {}\0", self.info.n_bytes).as_bytes());
                context
            }
            // Hubs of other kinds name contents otherwise; the size was compared.
            _ => return Ok(()),
        };
        let mut file = File::open(path).map_err(failed)?;
        let mut bytes = vec![0; READ_BYTES];
        loop {
            match file.read(&mut bytes).map_err(failed)? {
                0 => break,
                n => context.update(&bytes[..n]),
            }
        }
        let found = hexadecimal(context.finish().as_ref());
        if found == self.info.etag.to_ascii_lowercase() {
            return Ok(());
        }
        fs::remove_file(path).map_err(failed)?;
        Err(HubError::Checksum {
            name: self.repository.to_string(),
            file: self.file.to_owned(),
            expected: self.info.etag.clone(),
            found,
        })
    }
}

/// Bytes of a file; 0 if it does not exist.
fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
