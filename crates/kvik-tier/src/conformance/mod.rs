//! The behaviors of a tier, as a suite that every tier and every decorator runs.
//!
//! [`run`] makes a tier for each behavior of [`BEHAVIORS`] and names those that fail. [`run_under_faults`] is
//! for tiers that are made to fail: whatever happens, a hit has the right bytes.
//!
//! ```
//! use kvik_tier::conformance::{self, MapTier, Traits};
//!
//! conformance::run(&|| Box::new(MapTier::new()), &Traits::default());
//! ```

mod batches;
mod concurrency;
mod content;
mod faults;
mod heads;
mod limits;
mod manual_clock;
mod map_tier;
mod names;
mod reads;

use std::panic::{AssertUnwindSafe, catch_unwind};

pub use content::{content, content_key};
pub use faults::run_under_faults;
pub use heads::get_each_once;
pub use manual_clock::ManualClock;
pub use map_tier::MapTier;

use crate::tier::Tier;

/// What a kind of tier can do and others cannot.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a trait of its own")]
pub struct Traits {
    /// Whether it knows its keys without I/O. Default: yes.
    pub knows_keys: bool,
    /// Whether it knows the lengths of its keys without I/O. Default: yes.
    pub knows_lengths: bool,
    /// Whether `stat` has counts. Default: yes.
    pub knows_counts: bool,
    /// Whether `delete` tells how many keys were there. Default: yes.
    pub counts_deletes: bool,
    /// The bytes after which it is full; none if it never is in a test. Default: none.
    pub capacity_bytes: Option<u64>,
    /// The longest chunk that is tried. Default: 4 MiB.
    pub max_chunk_bytes: usize,
}

/// A tier under test.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "a function cannot be printed")]
pub struct Subject<'a> {
    make: &'a dyn Fn() -> Box<dyn Tier>,
    traits: &'a Traits,
}

/// One behavior of all tiers.
#[derive(Debug, Clone, Copy)]
pub struct Behavior {
    /// It as a sentence, in the form of a function's name.
    pub name: &'static str,
    check: fn(&Subject<'_>),
}

macro_rules! behaviors {
    ($($module:ident :: $behavior:ident),* $(,)?) => {
        &[$(Behavior { name: stringify!($behavior), check: $module::$behavior }),*]
    };
}

/// All behaviors.
pub const BEHAVIORS: &[Behavior] = behaviors![
    reads::a_chunk_comes_back_at_every_size,
    reads::a_chunk_in_several_parts_comes_back_in_one,
    reads::every_section_can_be_read_alone,
    reads::a_run_of_sections_can_be_read_at_once,
    reads::a_whole_read_of_another_length_is_no_hit,
    reads::a_range_past_the_end_is_no_hit,
    reads::a_hit_writes_its_buffer_and_nothing_else,
    heads::a_head_comes_with_the_range_behind_it,
    heads::a_head_comes_with_a_range_anywhere,
    heads::a_head_can_be_read_without_a_range,
    heads::a_head_and_a_buffer_are_a_whole_chunk_or_no_hit,
    heads::a_chunk_too_short_for_a_head_or_its_range_is_neither_hit_nor_miss,
    heads::a_head_of_what_is_not_there_is_a_miss,
    heads::every_item_arrives_once_with_its_outcome,
    heads::a_head_is_stored_before_its_chunk,
    names::what_was_never_stored_is_a_miss,
    names::what_is_present_stays,
    names::a_deleted_chunk_is_a_miss_and_can_be_stored_again,
    names::deleting_twice_deletes_once,
    names::other_ranks_and_namespaces_are_other_chunks,
    names::the_longest_prefix_ends_at_the_first_hole,
    names::visited_keys_are_those_that_are_there,
    names::a_flushed_chunk_is_still_there,
    batches::empty_batches_do_nothing,
    batches::a_key_twice_in_a_batch_is_stored_once,
    batches::a_hundred_chunks_go_in_and_out_in_one_batch,
    batches::a_batch_has_hits_and_misses_side_by_side,
    batches::contains_tells_holes,
    concurrency::readers_beside_writers_see_whole_chunks_only,
    concurrency::readers_beside_deleters_see_the_chunk_or_nothing,
    concurrency::writers_of_one_key_all_find_it_present,
    limits::counts_follow_what_is_stored,
    limits::a_full_tier_says_so_and_has_room_again_after_deleting,
];

/// Runs all behaviors, each on a tier of its own: `make` gives one that is empty and has room for 8 MiB or more.
///
/// # Panics
/// If any behavior fails, with the names of those that did.
pub fn run(make: &dyn Fn() -> Box<dyn Tier>, traits: &Traits) {
    let subject = Subject { make, traits };
    let failed: Vec<&str> = BEHAVIORS
        .iter()
        .filter(|behavior| catch_unwind(AssertUnwindSafe(|| (behavior.check)(&subject))).is_err())
        .map(|behavior| behavior.name)
        .collect();
    assert!(failed.is_empty(), "behaviors of a tier that this one has not: {}", failed.join(", "));
}

impl Default for Traits {
    fn default() -> Self {
        Self {
            knows_keys: true,
            knows_lengths: true,
            knows_counts: true,
            counts_deletes: true,
            capacity_bytes: None,
            max_chunk_bytes: 4 << 20,
        }
    }
}

impl Behavior {
    /// Checks it on tiers that `make` gives.
    ///
    /// # Panics
    /// If the tier does not have it.
    pub fn check(&self, make: &dyn Fn() -> Box<dyn Tier>, traits: &Traits) {
        (self.check)(&Subject { make, traits });
    }
}

impl Subject<'_> {
    fn tier(&self) -> Box<dyn Tier> {
        (self.make)()
    }
}
