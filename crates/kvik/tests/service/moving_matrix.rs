//! Some of the disturbed moves; `slow_moving_matrix` has all of them.

use crate::moving_case::{Cause, Continued, Fault, Step, Victim, disturb};

#[test]
fn a_source_that_dies_while_it_sends_blocks_loses_no_token() {
    disturb(Cause::Move, Victim::Source, Fault::Kill, Step::BlocksSent(2), 1);
}

#[test]
fn a_source_that_is_cut_off_behind_its_notice_loses_no_token() {
    disturb(Cause::Move, Victim::Source, Fault::Cut, Step::NoticeSent, 2);
}

#[test]
fn half_a_line_behind_a_notice_does_not_reach_the_next_stream() {
    let continued = disturb(Cause::Move, Victim::Source, Fault::Stop, Step::NoticeAndHalfALine, 3);
    assert_eq!(continued, Continued { moved: 1.0, replayed: 0.0, stayed: 0.0 });
}

#[test]
fn a_destination_that_dies_when_it_should_go_on_leaves_the_request_where_it_was() {
    let continued = disturb(Cause::Move, Victim::Destination, Fault::Kill, Step::ThawAnswered, 1);
    assert_eq!(continued, Continued { moved: 0.0, replayed: 0.0, stayed: 1.0 });
}

#[test]
fn a_destination_that_dies_in_its_first_bytes_loses_no_token() {
    disturb(Cause::Move, Victim::Destination, Fault::Kill, Step::ResumedStreamBegins, 1);
}

#[test]
fn a_destination_that_stops_while_it_takes_blocks_holds_nothing_up() {
    disturb(Cause::Move, Victim::Destination, Fault::Stop, Step::BlocksAnswered, 2);
}

#[test]
fn a_source_that_dies_before_it_is_thawed_after_its_destination_loses_no_token() {
    disturb(Cause::Move, Victim::Source, Fault::Kill, Step::ThawSent, 0);
}

#[test]
fn a_gateway_that_stops_between_two_workers_loses_no_token() {
    disturb(Cause::Move, Victim::Gateway, Fault::Stop, Step::NoticeSent, 3);
}

#[test]
fn a_destination_that_dies_while_it_takes_the_request_of_a_drained_worker_loses_no_token() {
    disturb(Cause::Drain, Victim::Destination, Fault::Kill, Step::BlocksAnswered, 1);
}

#[test]
fn a_coordinator_that_dies_while_a_worker_ends_holds_nothing_up() {
    disturb(Cause::Terminate, Victim::Coordinator, Fault::Kill, Step::OfferSent, 2);
}
