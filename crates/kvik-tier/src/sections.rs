//! Where the sections of a chunk begin and end.

/// A chunk in sections of one size, the last of which may be shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sections {
    /// Length of the chunk.
    pub(crate) chunk_bytes: u64,
    /// Length of its sections. At least 1.
    pub(crate) section_bytes: u64,
}

impl Sections {
    /// Sections of `section_bytes`, several together where there would be more than `max_sections`.
    ///
    /// 0 stands for the whole chunk.
    pub(crate) fn at_most(max_sections: u64, chunk_bytes: u64, section_bytes: u64) -> Self {
        let longest = chunk_bytes.max(1);
        let section_bytes = if section_bytes == 0 { longest } else { section_bytes.min(longest) };
        let n_together = chunk_bytes.div_ceil(section_bytes).div_ceil(max_sections).max(1);
        Self { chunk_bytes, section_bytes: section_bytes * n_together }
    }

    /// How many there are.
    pub(crate) fn n_sections(self) -> u64 {
        self.chunk_bytes.div_ceil(self.section_bytes)
    }

    /// The range of whole sections that has all bytes from `offset` to `end`; none if the chunk has not.
    pub(crate) fn widen(self, offset: u64, end: u64) -> Option<(u64, u64)> {
        if offset > end || end > self.chunk_bytes {
            return None;
        }
        let widened_end = end.div_ceil(self.section_bytes).saturating_mul(self.section_bytes);
        Some((offset / self.section_bytes * self.section_bytes, widened_end.min(self.chunk_bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_as_asked_for_or_several_together() {
        let size =
            |chunk_bytes, section_bytes| Sections::at_most(4, chunk_bytes, section_bytes).section_bytes;
        assert_eq!((size(100, 30), size(100, 25), size(100, 24)), (30, 25, 48));
        assert_eq!((size(100, 0), size(100, 1000), size(0, 0), size(100, 1)), (100, 100, 1, 25));
        assert_eq!(Sections::at_most(4, 100, 24).n_sections(), 3);
    }

    #[test]
    fn a_range_is_widened_to_its_sections_and_to_no_more_than_the_chunk() {
        let sections = Sections { chunk_bytes: 100, section_bytes: 30 };
        assert_eq!(sections.widen(31, 59), Some((30, 60)));
        assert_eq!(sections.widen(30, 60), Some((30, 60)));
        assert_eq!(sections.widen(95, 100), Some((90, 100)));
        assert_eq!((sections.widen(95, 101), sections.widen(2, 1)), (None, None));
        assert_eq!(sections.widen(100, 100), Some((90, 100)));
    }
}
