//! The namespaces of a store.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvik_tier::NamespaceId;
use parking_lot::RwLock;

/// A namespace as the store knows it.
#[derive(Debug)]
pub(crate) struct NamespaceState {
    pub(crate) id: NamespaceId,
    /// Its place in the list of namespaces.
    pub(crate) idx: u32,
    /// Counts clears. What began under an earlier count is not published.
    generation: AtomicU64,
}

/// The namespaces that were seen.
#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    known: RwLock<Known>,
}

#[derive(Debug, Default)]
struct Known {
    list: Vec<Arc<NamespaceState>>,
    by_id: HashMap<NamespaceId, Arc<NamespaceState>>,
}

// === impl NamespaceState ===

impl NamespaceState {
    pub(crate) fn new(id: NamespaceId, idx: u32) -> Self {
        Self { id, idx, generation: AtomicU64::new(0) }
    }

    /// Acquire and release, so that a reader of a new count also sees what was cleared before it.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn begin_generation(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }
}

// === impl Namespaces ===

impl Namespaces {
    /// Finds or adds a namespace.
    pub(crate) fn intern(&self, id: NamespaceId) -> Arc<NamespaceState> {
        if let Some(known) = self.find(id) {
            return known;
        }
        let mut known = self.known.write();
        let Known { list, by_id } = &mut *known;
        let namespace = by_id.entry(id).or_insert_with(|| {
            let added = Arc::new(NamespaceState::new(id, list.len() as u32));
            list.push(Arc::clone(&added));
            added
        });
        Arc::clone(namespace)
    }

    pub(crate) fn find(&self, id: NamespaceId) -> Option<Arc<NamespaceState>> {
        self.known.read().by_id.get(&id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<NamespaceState>> {
        self.known.read().list.clone()
    }

    pub(crate) fn id(&self, namespace_idx: u32) -> NamespaceId {
        self.known.read().list[namespace_idx as usize].id
    }

    /// The id of a place that may be none.
    pub(crate) fn find_id(&self, namespace_idx: u32) -> Option<NamespaceId> {
        self.known.read().list.get(namespace_idx as usize).map(|namespace| namespace.id)
    }

    /// Whether a namespace is of this store.
    pub(crate) fn is_ours(&self, namespace: &Arc<NamespaceState>) -> bool {
        let known = self.known.read();
        known.list.get(namespace.idx as usize).is_some_and(|ours| Arc::ptr_eq(ours, namespace))
    }
}
