//! What an engine says of itself when it attaches.

use std::time::Duration;

use kvik_memory::SocketAddress;
use kvik_node::{AttachOptions, ClientToken};
use kvik_store::{ChunkFormat, Priority, Retention};
use kvik_types::{BlockSize, Dtype, Namespace};
use pyo3::prelude::*;

use crate::error::{exception_of, invalid, invalid_type};

/// What an engine says of itself.
#[derive(Debug)]
pub(crate) struct EngineOptions {
    namespace: Namespace,
    pub(crate) format: ChunkFormat,
    rank: u16,
    token: Option<ClientToken>,
    timeout: Duration,
    pub(crate) n_copy_threads: usize,
}

impl EngineOptions {
    pub(crate) fn attach_to(self, socket: SocketAddress) -> AttachOptions {
        let mut attach = AttachOptions::new(socket, self.namespace, self.format);
        (attach.rank, attach.token, attach.timeout) = (self.rank, self.token, self.timeout);
        attach
    }

    pub(crate) fn try_new(
        (model, layout, dtype): (String, String, &str),
        (n_layers, token_layer_bytes, block_tokens, n_ranks): (u32, u64, usize, u16),
        rank: u16,
        token: Option<&str>,
        timeout_s: f64,
        n_copy_threads: Option<usize>,
    ) -> PyResult<Self> {
        let dtype: Dtype = dtype.parse().map_err(|error| invalid_type(&error))?;
        let block_tokens = BlockSize::try_new(block_tokens).map_err(|error| invalid_type(&error))?;
        if rank >= n_ranks {
            return Err(invalid("rank", &rank, &format!("less than n_ranks, {n_ranks}")));
        }
        let timeout = Duration::try_from_secs_f64(timeout_s).ok().filter(|timeout| !timeout.is_zero());
        let timeout = timeout.ok_or_else(|| invalid("timeout_s", &timeout_s, "more than 0"))?;
        let n_processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let n_copy_threads = n_copy_threads.unwrap_or((n_processors / 2).clamp(1, 8));
        if !(1..=64).contains(&n_copy_threads) {
            return Err(invalid("n_copy_threads", &n_copy_threads, "1 to 64"));
        }
        Ok(Self {
            namespace: Namespace { model, dtype, layout, tenant: String::new() },
            format: ChunkFormat { n_layers, token_layer_bytes, n_ranks, block_tokens },
            rank,
            token: token.map(ClientToken::try_new).transpose().map_err(|error| exception_of(&error))?,
            timeout,
            n_copy_threads,
        })
    }
}

/// How long chunks are kept, by the arguments of a save.
pub(crate) fn retention_of(ttl_s: Option<f64>, priority: &str) -> PyResult<Retention> {
    let time_to_live = ttl_s.map(|ttl_s| time_of("ttl_s", ttl_s)).transpose()?;
    if time_to_live.is_some_and(|time| time.is_zero()) {
        return Err(invalid("ttl_s", &0, "more than 0 seconds"));
    }
    let priority = match priority {
        "normal" => Priority::Normal,
        "low" => Priority::Low,
        _ => return Err(invalid("priority", &priority, "normal, low")),
    };
    Ok(Retention { time_to_live, priority })
}

/// The time of an argument in seconds.
pub(crate) fn time_of(field: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| invalid(field, &seconds, "0 or more seconds"))
}
