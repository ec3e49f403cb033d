//! What people and tools do with the store of a daemon: look, load ahead, pin, move, clear.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use kvik_memory::SocketAddress;
use kvik_node::{AttachOptions, NodeManager, RemotePrefetch};
use kvik_store::TierName;
use pyo3::prelude::*;

use crate::chain::{Chain, chain_of};
use crate::engine::{EngineOptions, time_of};
use crate::error::{KvikError, exception_of, invalid};

/// A managing connection with the daemon of a store: statistics, lookups, prefetches, pins, moves, clears.
///
/// It attaches when it is first used, and again when the daemon was gone and is back. Calls release Python's lock and go one after
/// the other; each ends within a minute. `asyncio.to_thread` makes any of them awaitable.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct Client {
    manager: Arc<NodeManager>,
}

/// Chunks that the daemon loads into its memory; begun by `Client.prefetch`, and ended with that client.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct Prefetch {
    manager: Arc<NodeManager>,
    prefetch: RemotePrefetch,
}

#[pymethods]
impl Client {
    /// A client of the daemon at `socket`, for the chunks of engines that `Store.attach` describes with the same arguments. A
    /// daemon that is not there is an error of the first call.
    #[staticmethod]
    #[pyo3(signature = (socket, *, model, layout, dtype, n_layers, token_layer_bytes, block_tokens, rank=0, n_ranks=1,
        token=None, timeout_s=10.0))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn attach(
        socket: PathBuf,
        model: String,
        layout: String,
        dtype: &str,
        n_layers: u32,
        token_layer_bytes: u64,
        block_tokens: usize,
        rank: u16,
        n_ranks: u16,
        token: Option<&str>,
        timeout_s: f64,
    ) -> PyResult<Self> {
        let options = EngineOptions::try_new(
            (model, layout, dtype),
            (n_layers, token_layer_bytes, block_tokens, n_ranks),
            rank,
            token,
            timeout_s,
            None,
        )?;
        Ok(Self::new(options.attach_to(SocketAddress::Path(socket))))
    }

    /// The chain of a sequence, as `Store.chain` makes it.
    #[pyo3(signature = (tokens, *, salt=None, extras=Vec::new()))]
    fn chain(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        salt: Option<&str>,
        extras: Vec<(usize, Vec<u8>)>,
    ) -> PyResult<Chain> {
        py.detach(|| {
            let space = self.manager.space().map_err(|error| exception_of(&error))?;
            chain_of(&space, &tokens, salt, extras)
        })
    }

    /// What the store has counted, and the state of its tiers: `chunk_tokens`, `counts` by name, `tiers`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stats = py.detach(|| self.manager.stats()).map_err(|error| exception_of(&error))?;
        let text = serde_json::to_string(&stats)
            .map_err(|error| KvikError::new_err(format!("write the statistics: {error}")))?;
        py.import("json")?.call_method1("loads", (text,))
    }

    /// How many tokens of a chain each tier has, from the first chunk on; a chunk counts for the fastest tier that has it.
    #[pyo3(signature = (chain, *, is_local=false))]
    fn lookup(&self, py: Python<'_>, chain: &Chain, is_local: bool) -> PyResult<BTreeMap<String, usize>> {
        let found = py.detach(|| self.manager.lookup(&chain.inner, is_local));
        Ok(by_name(found.map_err(|error| exception_of(&error))?.tokens_by_tier))
    }

    /// Begins to load a chain into the daemon's memory, from one tier alone where one is named.
    #[pyo3(signature = (chain, *, tier=None))]
    fn prefetch(&self, py: Python<'_>, chain: &Chain, tier: Option<&str>) -> PyResult<Prefetch> {
        let tier = tier.map(tier_of).transpose()?;
        let prefetch = py.detach(|| self.manager.prefetch(&chain.inner, tier.as_ref()));
        let prefetch = prefetch.map_err(|error| exception_of(&error))?;
        Ok(Prefetch { manager: Arc::clone(&self.manager), prefetch })
    }

    /// Keeps a chain in the daemon's memory until it is unpinned as often as it was pinned, also when this client is gone, and for
    /// `ttl_s` seconds at most; returns the tokens that are kept.
    #[pyo3(signature = (chain, *, ttl_s=None))]
    fn pin(&self, py: Python<'_>, chain: &Chain, ttl_s: Option<f64>) -> PyResult<usize> {
        let pinned = if let Some(ttl_s) = ttl_s {
            let time = time_of("ttl_s", ttl_s)?;
            py.detach(|| self.manager.pin_for(&chain.inner, time))
        } else {
            py.detach(|| self.manager.pin(&chain.inner))
        };
        pinned.map_err(|error| exception_of(&error))
    }

    /// Takes one pin away, one without an end before one with; says whether there was one.
    fn unpin(&self, py: Python<'_>, chain: &Chain) -> PyResult<bool> {
        py.detach(|| self.manager.unpin(&chain.inner)).map_err(|error| exception_of(&error))
    }

    /// Moves a chain from one tier to another, or copies it; returns the chunks that are there.
    #[pyo3(signature = (chain, source, target, *, keeps_source=false))]
    fn relocate(
        &self,
        py: Python<'_>,
        chain: &Chain,
        source: &str,
        target: &str,
        keeps_source: bool,
    ) -> PyResult<usize> {
        let (source, target) = (tier_of(source)?, tier_of(target)?);
        let moved = py.detach(|| self.manager.relocate(&chain.inner, source, target, keeps_source));
        moved.map_err(|error| exception_of(&error))
    }

    /// Forgets a chain and what follows it, or without one all chunks of these engines, in some tiers or in all; returns how many
    /// chunks left each tier.
    #[pyo3(signature = (chain=None, *, tiers=None))]
    fn clear(
        &self,
        py: Python<'_>,
        chain: Option<&Chain>,
        tiers: Option<Vec<String>>,
    ) -> PyResult<BTreeMap<String, usize>> {
        let tiers = tiers.map(|tiers| tiers.iter().map(|tier| tier_of(tier)).collect::<PyResult<_>>());
        let tiers = tiers.transpose()?;
        let chain = chain.map(|chain| &chain.inner);
        let cleared = py.detach(|| self.manager.clear(chain, tiers));
        cleared.map(by_name).map_err(|error| exception_of(&error))
    }

    /// Ends the connection, and with it its prefetches; its pins stay.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.manager.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, _kind: Py<PyAny>, _value: Py<PyAny>, _trace: Py<PyAny>) {
        self.close(py);
    }
}

impl Client {
    pub(crate) fn new(options: AttachOptions) -> Self {
        Self { manager: Arc::new(NodeManager::new(options)) }
    }
}

#[pymethods]
impl Prefetch {
    /// Whether it still loads; `None` where its connection has ended, which ended it too.
    fn is_loading(&self, py: Python<'_>) -> PyResult<Option<bool>> {
        py.detach(|| self.manager.is_loading(&self.prefetch)).map_err(|error| exception_of(&error))
    }

    /// Ends it; says whether it still loaded, and `None` where its connection has ended.
    fn cancel(&self, py: Python<'_>) -> PyResult<Option<bool>> {
        py.detach(|| self.manager.cancel(&self.prefetch)).map_err(|error| exception_of(&error))
    }
}

fn tier_of(name: &str) -> PyResult<TierName> {
    TierName::try_new(name).map_err(|_| invalid("tier", &name, "1 to 32 of `a-z`, `0-9` and `-`"))
}

fn by_name(counts: Vec<(TierName, usize)>) -> BTreeMap<String, usize> {
    counts.into_iter().map(|(tier, count)| (tier.as_str().to_owned(), count)).collect()
}
