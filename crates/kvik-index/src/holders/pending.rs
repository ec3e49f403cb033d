//! Events that wait for their parent, within bounds.

use std::collections::{BTreeMap, HashMap};

use super::types::{BlockKey, Tier};

/// A store event whose parent is not known yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PendingEvent {
    pub(super) parent: BlockKey,
    pub(super) tier: Tier,
    pub(super) keys: Vec<BlockKey>,
    pub(super) tokens: Vec<u32>,
    pub(super) block_tokens: usize,
    /// Blocks of it that were removed while it waited.
    pub(super) removed: Vec<BlockKey>,
}

/// Waiting events by parent; the oldest leave when there are too many.
#[derive(Debug)]
pub(super) struct PendingEvents {
    max_bytes: usize,
    n_bytes: usize,
    next: u64,
    events: BTreeMap<u64, PendingEvent>,
    by_parent: HashMap<BlockKey, Vec<u64>>,
    /// The last event that waits with a block, to find it when the block is removed.
    by_key: HashMap<(BlockKey, Tier), u64>,
}

impl PendingEvent {
    /// What it takes, the maps included: about 48 bytes a key.
    fn n_bytes(&self) -> usize {
        size_of::<Self>() + 128 + self.keys.len() * 64 + self.tokens.len() * 4
    }
}

impl PendingEvents {
    pub(super) fn new(max_bytes: usize) -> Self {
        let (by_parent, by_key) = (HashMap::new(), HashMap::new());
        Self { max_bytes, n_bytes: 0, next: 0, events: BTreeMap::new(), by_parent, by_key }
    }

    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    /// Lets an event wait; gives the number of events that had to leave for it, itself included if it
    /// is too large.
    pub(super) fn add(&mut self, event: PendingEvent) -> u64 {
        if event.n_bytes() > self.max_bytes {
            return 1;
        }
        let number = self.next;
        self.next += 1;
        self.n_bytes += event.n_bytes();
        self.by_parent.entry(event.parent).or_default().push(number);
        for key in &event.keys {
            self.by_key.insert((*key, event.tier), number);
        }
        self.events.insert(number, event);
        let mut n_dropped = 0;
        while self.n_bytes > self.max_bytes
            && let Some(oldest) = self.events.keys().next().copied()
        {
            self.take(oldest);
            n_dropped += 1;
        }
        n_dropped
    }

    /// Takes the events that wait for a block, oldest first.
    pub(super) fn take_children(&mut self, parent: BlockKey) -> Vec<PendingEvent> {
        let numbers = self.by_parent.get(&parent).cloned().unwrap_or_default();
        numbers.into_iter().filter_map(|number| self.take(number)).collect()
    }

    /// Notes the removal of a block in the event that waits with it; false if no event does.
    pub(super) fn remove(&mut self, key: BlockKey, tier: Tier) -> bool {
        let Some(number) = self.by_key.remove(&(key, tier)) else { return false };
        let Some(event) = self.events.get_mut(&number) else { return false };
        event.removed.push(key);
        true
    }

    /// Drops the events of a tier, or all; gives their number.
    pub(super) fn clear(&mut self, tier: Option<Tier>) -> u64 {
        let is_cleared = |event: &PendingEvent| tier.is_none_or(|tier| event.tier == tier);
        let numbers: Vec<u64> =
            self.events.iter().filter(|(_, event)| is_cleared(event)).map(|(number, _)| *number).collect();
        numbers.iter().filter_map(|number| self.take(*number)).count() as u64
    }

    fn take(&mut self, number: u64) -> Option<PendingEvent> {
        let event = self.events.remove(&number)?;
        self.n_bytes -= event.n_bytes().min(self.n_bytes);
        if let Some(siblings) = self.by_parent.get_mut(&event.parent) {
            siblings.retain(|sibling| *sibling != number);
            if siblings.is_empty() {
                self.by_parent.remove(&event.parent);
            }
        }
        for key in &event.keys {
            if self.by_key.get(&(*key, event.tier)) == Some(&number) {
                self.by_key.remove(&(*key, event.tier));
            }
        }
        Some(event)
    }
}
