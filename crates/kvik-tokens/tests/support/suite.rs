//! The suite, which each target runs as often as it has time for.

/// Tests with so many texts, and with so many sets of texts that grow or part, which take longer.
#[macro_export]
macro_rules! exact_tokens {
    (n_texts: $n_texts:literal, n_conversations: $n_conversations:literal) => {
        use proptest::prelude::*;

        use $crate::support::kinds::any_text;
        use $crate::support::properties::*;

        proptest! {
            #![proptest_config(ProptestConfig::with_cases($n_texts))]

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
            #![proptest_config(ProptestConfig::with_cases($n_conversations))]

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
    };
}
