//! Places in a store's list of tiers, and their names.

use std::fmt;
use std::sync::Arc;

use kvik_tier::{Tier, TierKind};

use crate::error::{Result, StoreError};

/// Tiers that a store can have, memory included.
pub(crate) const MAX_TIERS: usize = 8;

/// A place in the list of tiers; memory is the first, then the others in the order of the builder.
pub(crate) type TierIdx = usize;

/// Memory.
pub(crate) const RAM: TierIdx = 0;

/// The ranks that each tier has of one chunk, one bit for each.
pub(crate) type TierRanks = [u64; MAX_TIERS];

const NAMES: &str = "1 to 32 of a-z, 0-9 and -";

/// The name of a tier: 1 to 32 of `a-z`, `0-9` and `-`. No two tiers of a store have the same; memory is `ram`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TierName(Arc<str>);

/// A tier as people and metrics see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierLabel {
    /// Its name.
    pub name: TierName,
    /// What it is made of.
    pub kind: TierKind,
}

/// A tier to be put below memory.
#[derive(Debug, Clone)]
pub struct LowerTier {
    /// Its name. `None`: that of its kind, with a number if another tier has it.
    pub name: Option<TierName>,
    /// The tier.
    pub tier: Arc<dyn Tier>,
    /// Whether only this store writes it and it knows its keys, so that the store decides what leaves it.
    pub is_local: bool,
    /// Threads that read from it. `None`: those of [`StoreOptions`](crate::StoreOptions::n_read_threads).
    pub n_read_threads: Option<usize>,
}

/// A set of tiers, one bit for each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TierSet(u8);

// === impl TierName ===

impl TierName {
    /// A name.
    ///
    /// # Errors
    /// If it is empty, longer than 32 bytes or has other characters.
    pub fn try_new(name: &str) -> Result<Self> {
        let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if (1..=32).contains(&name.len()) && name.bytes().all(is_allowed) {
            return Ok(Self(name.into()));
        }
        Err(StoreError::invalid("name of a tier", &name, NAMES))
    }

    /// The name of a tier of a kind that was given none: that of the kind, or with the first number from 2 on
    /// that `is_taken` does not know.
    pub fn of_kind(kind: TierKind, is_taken: impl Fn(&Self) -> bool) -> Self {
        let mut name = Self::from(kind);
        let mut number = 2;
        while is_taken(&name) {
            name = Self(format!("{kind}-{number}").into());
            number += 1;
        }
        name
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<TierKind> for TierName {
    fn from(kind: TierKind) -> Self {
        Self(kind.name().into())
    }
}

impl PartialEq<TierKind> for TierName {
    fn eq(&self, kind: &TierKind) -> bool {
        &*self.0 == kind.name()
    }
}

impl fmt::Display for TierName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(&self.0)
    }
}

// === impl LowerTier ===

impl LowerTier {
    /// A tier that only this store writes and that knows its keys.
    pub fn local(tier: Arc<dyn Tier>) -> Self {
        Self { name: None, tier, is_local: true, n_read_threads: None }
    }

    /// A tier that others write too and that is asked for what it has.
    pub fn remote(tier: Arc<dyn Tier>) -> Self {
        Self { name: None, tier, is_local: false, n_read_threads: None }
    }

    /// The same tier under a name.
    #[must_use]
    pub fn named(self, name: TierName) -> Self {
        Self { name: Some(name), ..self }
    }
}

/// The labels of memory and of the tiers below it.
///
/// # Errors
/// If there are too many, if one of them is memory, or if two have one name.
pub(crate) fn label_tiers(lowers: &[LowerTier]) -> Result<Arc<[TierLabel]>> {
    if lowers.len() >= MAX_TIERS {
        let allowed = format!("at most {} below memory", MAX_TIERS - 1);
        return Err(StoreError::invalid("tiers", &lowers.len(), allowed));
    }
    let mut labels = vec![TierLabel { name: TierKind::Ram.into(), kind: TierKind::Ram }];
    for lower in lowers {
        let kind = lower.tier.kind();
        if kind == TierKind::Ram {
            return Err(StoreError::invalid("tier", &kind, "another kind than memory below memory"));
        }
        let is_given = |name: &TierName| lowers.iter().any(|other| other.name.as_ref() == Some(name));
        let name = match &lower.name {
            Some(name) => name.clone(),
            None => TierName::of_kind(kind, |name| {
                is_given(name) || labels.iter().any(|label| label.name == *name)
            }),
        };
        if labels.iter().any(|label| label.name == name) {
            return Err(StoreError::invalid("tier", &name, "a name that no other tier has"));
        }
        labels.push(TierLabel { name, kind });
    }
    Ok(labels.into())
}

// === impl TierSet ===

impl TierSet {
    pub(crate) fn insert(&mut self, tier: TierIdx) {
        self.0 |= 1 << tier;
    }

    pub(crate) fn contains(self, tier: TierIdx) -> bool {
        self.0 & (1 << tier) != 0
    }
}

impl FromIterator<TierIdx> for TierSet {
    fn from_iter<I: IntoIterator<Item = TierIdx>>(tiers: I) -> Self {
        let mut set = Self::default();
        tiers.into_iter().for_each(|tier| set.insert(tier));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_few_characters_and_a_bounded_length() {
        for name in ["nvme", "a", "fast-2", &"x".repeat(32)] {
            assert_eq!(TierName::try_new(name).unwrap().as_str(), name);
        }
        for name in ["", "Fast", "a_b", "a b", "\u{e4}", &"x".repeat(33)] {
            assert!(TierName::try_new(name).is_err(), "{name}");
        }
    }

    #[test]
    fn a_tier_without_a_name_gets_that_of_its_kind_and_a_number() {
        let name = |taken: &[&str]| {
            let is_taken = |name: &TierName| taken.contains(&name.as_str());
            TierName::of_kind(TierKind::Nvme, is_taken).as_str().to_owned()
        };
        assert_eq!(name(&[]), "nvme");
        assert_eq!(name(&["nvme"]), "nvme-2");
        assert_eq!(name(&["nvme", "nvme-2"]), "nvme-3");
    }
}
