//! A set of small integers that finds its least member at once.

/// A bitmap with bitmaps of its words above it, up to one word.
///
/// Adding, removing and finding the least member each touch one word a level: five for a billion members.
#[derive(Debug, Default)]
pub(super) struct BitTree {
    /// The members first; a bit of each further level says that a word below it is not zero.
    levels: Vec<Vec<u64>>,
}

impl BitTree {
    /// An empty set of integers below `n_members`.
    pub(super) fn new(n_members: usize) -> Self {
        let mut levels = Vec::new();
        let mut n_words = n_members.div_ceil(64).max(1);
        loop {
            levels.push(vec![0; n_words]);
            if n_words == 1 {
                return Self { levels };
            }
            n_words = n_words.div_ceil(64);
        }
    }

    /// Adds `member`, which must be below the set's bound.
    pub(super) fn insert(&mut self, member: u32) {
        let mut at = member as usize;
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            let was_empty = *word == 0;
            *word |= 1 << (at % 64);
            if !was_empty {
                return;
            }
            at /= 64;
        }
    }

    /// Removes `member`, which must be there.
    pub(super) fn remove(&mut self, member: u32) {
        let mut at = member as usize;
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            *word &= !(1 << (at % 64));
            if *word != 0 {
                return;
            }
            at /= 64;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.levels.last().is_none_or(|top| top[0] == 0)
    }

    /// Whether `member` is there; what lies past the bound never is.
    pub(super) fn contains(&self, member: u32) -> bool {
        let at = member as usize;
        self.levels
            .first()
            .and_then(|members| members.get(at / 64))
            .is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    /// The least member.
    pub(super) fn first(&self) -> Option<u32> {
        let mut at = 0;
        for level in self.levels.iter().rev() {
            let word = level[at];
            if word == 0 {
                return None;
            }
            at = at * 64 + word.trailing_zeros() as usize;
        }
        Some(at as u32)
    }

    /// The least member that is not below `bound`.
    pub(super) fn first_from(&self, bound: u32) -> Option<u32> {
        let mut at = bound as usize;
        for (level_idx, level) in self.levels.iter().enumerate() {
            let rest = level.get(at / 64)? >> (at % 64);
            if rest == 0 {
                at = at / 64 + 1;
                continue;
            }
            at += rest.trailing_zeros() as usize;
            for lower in self.levels[..level_idx].iter().rev() {
                at = at * 64 + lower[at].trailing_zeros() as usize;
            }
            return Some(at as u32);
        }
        None
    }

    /// All members, rising.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.first(), |member| self.first_from(member + 1))
    }
}
