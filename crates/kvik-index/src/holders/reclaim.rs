//! What readers hold, and when a number that they may still know can be given out again.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering::Acquire, fence};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;

use super::arena::Extents;
use super::sets::{SetChunks, SetRef};
use super::table::Directory;

/// One consistent view of the arrays; what is in them goes on changing.
#[derive(Debug, Clone)]
pub(super) struct Root {
    pub(super) directory: Arc<Directory>,
    pub(super) extents: Arc<Extents>,
    pub(super) sets: Arc<SetChunks>,
}

/// A number that was freed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Freed {
    Set(SetRef),
    Holder(u16),
    Source(u32),
    Extent(u32),
}

/// Publishes roots and keeps freed numbers until every reader that started before has ended.
#[derive(Debug)]
pub(super) struct Reclaimer {
    current: Arc<Root>,
    generation: u64,
    /// Roots that were replaced, with their generation, oldest first.
    replaced: VecDeque<(u64, Weak<Root>)>,
    /// Numbers that were freed, with the root of that time.
    waiting: VecDeque<(u64, Freed)>,
}

impl Reclaimer {
    pub(super) fn new(root: Root) -> Self {
        Self { current: Arc::new(root), generation: 0, replaced: VecDeque::new(), waiting: VecDeque::new() }
    }

    pub(super) fn current(&self) -> &Arc<Root> {
        &self.current
    }

    pub(super) fn publish(&mut self, shared: &ArcSwap<Root>, root: Root) {
        let old = std::mem::replace(&mut self.current, Arc::new(root));
        shared.store(Arc::clone(&self.current));
        self.replaced.push_back((self.generation, Arc::downgrade(&old)));
        self.generation += 1;
        drop(old);
        while self.replaced.front().is_some_and(|(_, root)| root.strong_count() == 0) {
            self.replaced.pop_front();
        }
    }

    /// Keeps a number back that readers of the current root may know.
    pub(super) fn free(&mut self, freed: Freed) {
        self.waiting.push_back((self.generation, freed));
    }

    pub(super) fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.waiting.capacity() * size_of::<(u64, Freed)>()
            + self.replaced.capacity() * size_of::<(u64, Weak<Root>)>()) as u64
    }

    /// Publishes the current view again if numbers wait for that, so that later readers are known to
    /// be later.
    pub(super) fn advance(&mut self, shared: &ArcSwap<Root>) {
        if self.waiting.back().is_some_and(|(generation, _)| *generation == self.generation) {
            let root = Root::clone(&self.current);
            self.publish(shared, root);
        }
    }

    /// The next number that no reader knows any more.
    pub(super) fn reclaim(&mut self) -> Option<Freed> {
        let (generation, freed) = *self.waiting.front()?;
        while self.replaced.front().is_some_and(|(_, root)| root.strong_count() == 0) {
            self.replaced.pop_front();
        }
        let oldest_in_use = self.replaced.front().map_or(self.generation, |(generation, _)| *generation);
        if generation >= oldest_in_use {
            return None;
        }
        // Pairs with the release by which the last reader gave the root back: its reads are over.
        fence(Acquire);
        self.waiting.pop_front();
        Some(freed)
    }
}
