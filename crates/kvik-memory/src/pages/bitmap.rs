//! A set of small integers with its smallest and largest member at hand.

/// A set of the integers below a fixed bound.
///
/// Level 0 has a bit for each integer; a bit of level k + 1 says whether a word of level k has any
/// bit. Insertion, removal and every search touch at most one word a level: four levels for 2^20.
#[derive(Debug, Clone)]
pub(crate) struct Bitmap {
    levels: Vec<Vec<u64>>,
    len: u32,
}

impl Bitmap {
    /// An empty set of integers below `bound`.
    pub(crate) fn new(bound: u32) -> Self {
        let mut levels = vec![vec![0_u64; (bound as usize).div_ceil(64).max(1)]];
        let mut n_words = levels[0].len();
        while n_words > 1 {
            n_words = n_words.div_ceil(64);
            levels.push(vec![0; n_words]);
        }
        Self { levels, len: 0 }
    }

    /// How many integers are in the set.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The members `64 * word_idx .. 64 * word_idx + 64` as bits.
    pub(crate) fn word(&self, word_idx: u32) -> u64 {
        self.levels[0][word_idx as usize]
    }

    /// Whether `index` is a member; an integer at or above the bound is not.
    pub(crate) fn contains(&self, index: u32) -> bool {
        self.levels[0].get(index as usize / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
    }

    /// Adds the bits of `mask` to a word of level 0.
    pub(crate) fn insert_mask(&mut self, word_idx: u32, mask: u64) {
        let mut idx = word_idx as usize;
        let word = &mut self.levels[0][idx];
        let before = *word;
        *word |= mask;
        self.len += (mask & !before).count_ones();
        if before != 0 || mask == 0 {
            return;
        }
        for level in &mut self.levels[1..] {
            let word = &mut level[idx / 64];
            let before = *word;
            *word |= 1 << (idx % 64);
            if before != 0 {
                return;
            }
            idx /= 64;
        }
    }

    /// Takes the bits of `mask` out of a word of level 0.
    pub(crate) fn remove_mask(&mut self, word_idx: u32, mask: u64) {
        let mut idx = word_idx as usize;
        let word = &mut self.levels[0][idx];
        let before = *word;
        *word &= !mask;
        let after = *word;
        self.len -= (mask & before).count_ones();
        if before == 0 || after != 0 {
            return;
        }
        for level in &mut self.levels[1..] {
            let word = &mut level[idx / 64];
            *word &= !(1 << (idx % 64));
            if *word != 0 {
                return;
            }
            idx /= 64;
        }
    }

    /// Adds `index`, which is below the bound.
    pub(crate) fn insert(&mut self, index: u32) {
        self.insert_mask(index / 64, 1 << (index % 64));
    }

    /// Takes `index` out, which is below the bound.
    pub(crate) fn remove(&mut self, index: u32) {
        self.remove_mask(index / 64, 1 << (index % 64));
    }

    /// The smallest member.
    pub(crate) fn first(&self) -> Option<u32> {
        self.descend(self.levels.len() - 1, 0, u64::trailing_zeros)
    }

    /// The largest member.
    pub(crate) fn last(&self) -> Option<u32> {
        let top = self.levels.len() - 1;
        self.descend(top, self.levels[top].len() - 1, u64::ilog2)
    }

    /// The smallest member that is `from` or larger.
    pub(crate) fn first_from(&self, from: u32) -> Option<u32> {
        let mut idx = from as usize;
        for (level_idx, level) in self.levels.iter().enumerate() {
            let word = *level.get(idx / 64)? & (u64::MAX << (idx % 64));
            if word != 0 {
                let found = idx / 64 * 64 + word.trailing_zeros() as usize;
                return match level_idx {
                    0 => Some(found as u32),
                    _ => self.descend(level_idx - 1, found, u64::trailing_zeros),
                };
            }
            idx = idx / 64 + 1;
        }
        None
    }

    /// The members in rising order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.first(), |&index| self.first_from(index + 1))
    }

    /// Goes from a word down to a bit of level 0, on each level to the bit that `choose` names.
    fn descend(&self, level_idx: usize, word_idx: usize, choose: impl Fn(u64) -> u32) -> Option<u32> {
        let mut idx = word_idx;
        for level in self.levels[..=level_idx].iter().rev() {
            let word = level[idx];
            if word == 0 {
                return None;
            }
            idx = idx * 64 + choose(word) as usize;
        }
        Some(idx as u32)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_bitmap_is_a_set(
            bound in prop_oneof![1_u32..200, 4_000_u32..4_200, Just(300_000_u32)],
            steps in prop::collection::vec((any::<bool>(), any::<u32>(), any::<u32>()), 1..80),
        ) {
            let mut bitmap = Bitmap::new(bound);
            let mut model = BTreeSet::new();
            for (is_insert, index, from) in steps {
                let (index, from) = (index % bound, from % (bound + 1));
                if is_insert {
                    bitmap.insert(index);
                    model.insert(index);
                } else {
                    let index = model.range(index..).next().copied().unwrap_or(index);
                    bitmap.remove(index);
                    model.remove(&index);
                }
                prop_assert_eq!(bitmap.len() as usize, model.len());
                prop_assert_eq!(bitmap.first(), model.first().copied());
                prop_assert_eq!(bitmap.last(), model.last().copied());
                prop_assert_eq!(bitmap.first_from(from), model.range(from..).next().copied());
                prop_assert_eq!(bitmap.contains(from), model.contains(&from));
            }
            prop_assert!(bitmap.iter().eq(model));
        }
    }
}
