//! Three coordinators on a state that they share: a real etcd, a server that speaks what is used of the API of
//! Kubernetes, and, with the feature `kubernetes-tests`, a real API server of Kubernetes.

#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

#[path = "../../../../tests/support/etcd.rs"]
mod etcd;
mod etcd_state;
#[cfg(feature = "kubernetes-tests")]
#[path = "../../../../tests/support/kube_server.rs"]
mod kube_server;
mod kubernetes;
#[path = "../../../../tests/support/port.rs"]
mod port;
#[cfg(feature = "kubernetes-tests")]
mod real_kubernetes;
mod small_api_server;
mod suite;
#[path = "../support/mod.rs"]
mod support;
#[path = "../withheld/mod.rs"]
mod withheld;

#[cfg(feature = "kubernetes-tests")]
use support::poll;

/// Runs functions of `$suite` on `$state`, each as a test of its name in the module `$module`.
macro_rules! conformance {
    ($module:ident, $state:ty, $suite:ident: $($test:ident),+ $(,)?) => {
        mod $module {
            $(
                #[tokio::test]
                async fn $test() {
                    crate::$suite::$test::<$state>().await;
                }
            )+
        }
    };
}

/// What holds of every state.
macro_rules! every_state {
    ($module:ident, $state:ty) => {
        conformance!(
            $module, $state, suite:
            any_coordinator_can_be_asked,
            a_killed_leader_is_replaced_in_time_and_no_registration_is_lost,
            a_leader_that_ends_in_order_is_replaced_at_once,
            members_outlive_all_coordinators,
            a_leader_that_lost_its_lead_does_not_write_under_its_old_term,
            without_the_server_reads_go_on_and_writes_wait_for_it,
            a_later_leader_knows_the_store_daemons_and_takes_none_for_a_worker,
        );
    };
}

/// What holds of every state, with a proxy between it and the coordinators that can read what they say.
macro_rules! lost_answers {
    ($module:ident, $state:ty) => {
        conformance!(
            $module, $state, suite:
            a_coordinator_that_drains_during_its_campaign_leaves_no_leader_behind,
            a_campaign_whose_answer_is_lost_does_not_stand_in_the_way_of_the_next_one,
        );
    };
}

/// What holds of the state in the API server of Kubernetes.
macro_rules! every_api_server {
    ($module:ident, $state:ty) => {
        conformance!(
            $module, $state, kubernetes:
            a_lead_is_taken_over_after_its_duration_whatever_the_clock_of_its_holder_says,
            objects_that_others_change_at_the_same_time_lose_nothing,
            members_that_were_removed_by_hand_are_written_again,
            a_lease_that_was_removed_comes_back_with_a_later_term,
        );
    };
}

every_state!(on_etcd, crate::etcd_state::Etcd);
lost_answers!(on_etcd_with_lost_answers, crate::etcd_state::Etcd);
every_state!(on_a_small_api_server, crate::small_api_server::SmallApiServer);
lost_answers!(on_a_small_api_server_with_lost_answers, crate::small_api_server::SmallApiServer);
every_api_server!(in_leases_of_a_small_api_server, crate::small_api_server::SmallApiServer);
#[cfg(feature = "kubernetes-tests")]
every_state!(on_kubernetes, crate::real_kubernetes::RealKubernetes);
#[cfg(feature = "kubernetes-tests")]
every_api_server!(in_leases_of_kubernetes, crate::real_kubernetes::RealKubernetes);
