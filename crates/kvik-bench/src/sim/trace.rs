//! Reads request traces in Mooncake's format.

use std::collections::HashMap;
use std::io::BufRead;

use serde::{Deserialize, Serialize};

/// Tokens of one block of a trace.
pub const TOKENS_PER_BLOCK: u64 = 512;

/// A trace, in order of time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    requests: Vec<TraceRequest>,
}

/// One request of a trace, as one line of JSON has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceRequest {
    /// When it came, in milliseconds from the beginning.
    pub timestamp: u64,
    /// Tokens of its prompt.
    pub input_length: u64,
    /// Tokens that were generated for it.
    pub output_length: u32,
    /// Its blocks of [`TOKENS_PER_BLOCK`] tokens; equal ids are equal up to and including the block.
    pub hash_ids: Vec<u64>,
}

/// Why a trace cannot be replayed. Lines are counted from 1.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It cannot be read.
    #[error("line {line}: {source}")]
    Io {
        /// Where.
        line: usize,
        /// Why.
        source: std::io::Error,
    },
    /// A line is not a request.
    #[error("line {line}: not a request: {source}")]
    Syntax {
        /// Where.
        line: usize,
        /// Why.
        source: serde_json::Error,
    },
    /// A request contradicts itself or one before it.
    #[error("line {line}: {reason}")]
    Inconsistent {
        /// Where.
        line: usize,
        /// Why.
        reason: String,
    },
}

impl Trace {
    /// Reads one request a line; empty lines are skipped.
    ///
    /// # Errors
    ///
    /// Every line must be a request whose number of blocks fits its length, no earlier than the one before
    /// it, and a block must come after the same block everywhere.
    pub fn read(reader: impl BufRead) -> Result<Self, TraceError> {
        let mut builder = Builder::default();
        for (index, text) in reader.lines().enumerate() {
            let line = index + 1;
            let text = text.map_err(|source| TraceError::Io { line, source })?;
            if text.trim().is_empty() {
                continue;
            }
            let request =
                serde_json::from_str(&text).map_err(|source| TraceError::Syntax { line, source })?;
            builder.add(request).map_err(|reason| TraceError::Inconsistent { line, reason })?;
        }
        Ok(Self { requests: builder.requests })
    }

    /// Makes a trace of requests that the caller has; positions count as lines.
    pub fn try_new(requests: Vec<TraceRequest>) -> Result<Self, TraceError> {
        let mut builder = Builder::default();
        for (index, request) in requests.into_iter().enumerate() {
            builder.add(request).map_err(|reason| TraceError::Inconsistent { line: index + 1, reason })?;
        }
        Ok(Self { requests: builder.requests })
    }

    /// The requests in order.
    pub fn requests(&self) -> &[TraceRequest] {
        &self.requests
    }

    /// Blocks of all requests.
    pub fn n_blocks(&self) -> u64 {
        self.requests.iter().map(|request| request.hash_ids.len() as u64).sum()
    }
}

#[derive(Default)]
struct Builder {
    requests: Vec<TraceRequest>,
    /// What comes before each block.
    parents: HashMap<u64, Option<u64>>,
    last_ms: u64,
}

impl Builder {
    fn add(&mut self, request: TraceRequest) -> Result<(), String> {
        let n_blocks = request.hash_ids.len() as u64;
        let n_expected = request.input_length.div_ceil(TOKENS_PER_BLOCK);
        if n_blocks == 0 || n_blocks != n_expected {
            let n_tokens = request.input_length;
            return Err(format!("{n_blocks} blocks for {n_tokens} tokens, which are {n_expected} blocks"));
        }
        if request.timestamp < self.last_ms {
            return Err(format!("timestamp {} after {}", request.timestamp, self.last_ms));
        }
        self.last_ms = request.timestamp;
        let mut parent = None;
        for &id in &request.hash_ids {
            if *self.parents.entry(id).or_insert(parent) != parent {
                return Err(format!("block {id} comes after another block than before"));
            }
            parent = Some(id);
        }
        self.requests.push(request);
        Ok(())
    }
}
