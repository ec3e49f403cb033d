//! Moves of requests between workers: each process killed, stopped and cut off at every step of the protocol.
//!
//! One test for each step, so that some can be run by name.

#![expect(clippy::unwrap_used, reason = "the helpers are tests too: what they cannot do ends the test")]
#![allow(dead_code, reason = "the helpers are those of the other suite, which uses more of them")]

#[path = "../service/cluster.rs"]
mod cluster;
#[path = "../service/fault_proxy.rs"]
mod fault_proxy;
#[path = "../service/http.rs"]
mod http;
#[path = "../service/moving_case.rs"]
mod moving_case;
#[path = "../service/process.rs"]
mod process;
#[path = "../service/streams.rs"]
mod streams;

use moving_case::{Cause, FAULTS, STEPS, Step, VICTIMS, disturb};
use parking_lot::Mutex;

/// One after the other: each starts five processes, which miss each other quickly.
static TURN: Mutex<()> = Mutex::new(());

/// Disturbs moves that an operator asks for at the steps `chosen`, with a kind of request that changes from case to case.
fn disturb_at(chosen: impl Fn(Step) -> bool) {
    disturb_by(&[Cause::Move], chosen);
}

/// The same of a worker that drains, by a call and by a signal in turn.
fn disturb_drains_at(chosen: impl Fn(Step) -> bool) {
    disturb_by(&[Cause::Drain, Cause::Terminate], chosen);
}

fn disturb_by(causes: &[Cause], chosen: impl Fn(Step) -> bool) {
    let _turn = TURN.lock();
    let cases = STEPS.into_iter().flat_map(|step| {
        VICTIMS.into_iter().flat_map(move |victim| FAULTS.map(|fault| (victim, fault, step)))
    });
    let numbered = cases.enumerate().filter(|(_, (_, _, step))| chosen(*step));
    let mut failed = Vec::new();
    for (number, (victim, fault, step)) in numbered {
        // The outputs of one with several are sent one by one.
        let kind = if step == Step::BlocksSent(2) { 1 } else { (number + number / 4) % 4 };
        let cause = causes[number % causes.len()];
        if std::panic::catch_unwind(|| disturb(cause, victim, fault, step, kind)).is_err() {
            failed.push((cause, victim, fault, step, kind));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn faults_while_a_request_runs_lose_no_token_and_hold_nothing() {
    disturb_at(|step| step == Step::Running);
}

#[test]
fn faults_at_the_offer_lose_no_token_and_hold_nothing() {
    disturb_at(|step| matches!(step, Step::OfferSent | Step::OfferAnswered));
}

#[test]
fn faults_while_blocks_are_sent_lose_no_token_and_hold_nothing() {
    disturb_at(|step| matches!(step, Step::BlocksSent(_) | Step::BlocksAnswered));
}

#[test]
fn faults_at_the_notice_lose_no_token_and_hold_nothing() {
    disturb_at(|step| matches!(step, Step::NoticeSent | Step::NoticeAndHalfALine));
}

#[test]
fn faults_when_the_request_goes_on_lose_no_token_and_hold_nothing() {
    disturb_at(|step| {
        matches!(step, Step::ResumeSent | Step::ResumedStreamBegins | Step::ResumedStreamGoesOn)
    });
}

#[test]
fn faults_at_the_thaw_lose_no_token_and_hold_nothing() {
    disturb_at(|step| matches!(step, Step::ThawSent | Step::ThawAnswered));
}

#[test]
fn faults_of_a_drain_while_a_request_runs_lose_no_token_and_hold_nothing() {
    disturb_drains_at(|step| step == Step::Running);
}

#[test]
fn faults_of_a_drain_at_the_offer_lose_no_token_and_hold_nothing() {
    disturb_drains_at(|step| matches!(step, Step::OfferSent | Step::OfferAnswered));
}

#[test]
fn faults_of_a_drain_while_blocks_are_sent_lose_no_token_and_hold_nothing() {
    disturb_drains_at(|step| matches!(step, Step::BlocksSent(_) | Step::BlocksAnswered));
}

#[test]
fn faults_of_a_drain_at_the_notice_lose_no_token_and_hold_nothing() {
    disturb_drains_at(|step| matches!(step, Step::NoticeSent | Step::NoticeAndHalfALine));
}

#[test]
fn faults_of_a_drain_when_the_request_goes_on_lose_no_token_and_hold_nothing() {
    disturb_drains_at(|step| {
        matches!(step, Step::ResumeSent | Step::ResumedStreamBegins | Step::ResumedStreamGoesOn)
    });
}

#[test]
fn faults_of_a_drain_at_the_thaw_lose_no_token_and_hold_nothing() {
    disturb_drains_at(|step| matches!(step, Step::ThawSent | Step::ThawAnswered));
}
