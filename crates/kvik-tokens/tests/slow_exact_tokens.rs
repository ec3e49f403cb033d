//! The same as `exact_tokens`, with many texts.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

#[expect(clippy::missing_panics_doc, reason = "a test panics where it fails")]
pub mod support;

use proptest::prelude::*;

use support::kinds::any_text;
use support::properties::{
    any_branches, any_growth, pools_change_no_token, sides_of_cuts_join, stores_change_no_token,
    tokens_before_cuts_stay,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn both_sides_of_a_cut_join_to_the_whole(text in any_text(1..40)) {
        sides_of_cuts_join(&text)?;
    }

    #[test]
    fn the_tokens_before_a_cut_do_not_depend_on_what_follows(
        shared in any_text(1..20), first in any_text(0..12), second in any_text(0..12),
    ) {
        tokens_before_cuts_stay(&shared, [&first, &second])?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn a_store_changes_no_token(branches in any_branches()) {
        stores_change_no_token(&branches, 1 << 20)?;
    }

    #[test]
    fn a_store_that_forgets_changes_no_token(branches in any_branches()) {
        stores_change_no_token(&branches, 6 << 10)?;
    }

    #[test]
    fn a_pool_changes_no_token(growth in any_growth()) {
        pools_change_no_token(&growth)?;
    }
}
