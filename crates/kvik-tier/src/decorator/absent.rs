//! A tier that could not be opened.

use super::{not_asked, skip_gets, skip_puts};
use crate::error::Result;
use crate::key::ChunkKey;
use crate::tier::{GetItem, PutItem, Tier, TierHealth, TierKind, TierStat};

/// Stands for a tier that could not be opened: it has nothing, takes nothing and says why.
#[derive(Debug)]
pub struct Absent {
    kind: TierKind,
    reason: String,
}

impl Absent {
    /// A tier of a kind that is not there for a reason.
    pub fn new(kind: TierKind, reason: impl Into<String>) -> Self {
        Self { kind, reason: reason.into() }
    }
}

impl Tier for Absent {
    fn kind(&self) -> TierKind {
        self.kind
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        skip_puts(batch);
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        skip_gets(batch);
    }

    fn contains(&self, _: &[ChunkKey], _: &mut [bool]) -> Result<()> {
        Err(not_asked(self.kind, "it could not be opened"))
    }

    fn delete(&self, _: &[ChunkKey]) -> Result<usize> {
        Err(not_asked(self.kind, "it could not be opened"))
    }

    fn visit_keys(&self, _: &mut dyn FnMut(ChunkKey, u64)) {}

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn stat(&self) -> TierStat {
        TierStat { health: TierHealth::Down(self.reason.clone()), ..TierStat::default() }
    }
}
