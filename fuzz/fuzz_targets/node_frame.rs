//! What a client of the store daemon sends, and what it is answered, as a hostile peer sends them.
//!
//! A frame that is accepted means the same when it is written and read again.

#![no_main]

use kvik_node::{Attach, Attached, ManageAnswer, ManageRequest, WatchFrame};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    check(input);
    // Random bytes rarely begin right; these do, so that the checks behind are reached.
    check(&[b"KVIKND04", input].concat());
});

fn check(input: &[u8]) {
    if let Ok(attach) = Attach::decode(input) {
        assert_eq!(Attach::decode(&attach.encode()).ok(), Some(attach));
    }
    if let Ok(attached) = Attached::decode(input) {
        assert_eq!(attached.encode(), input);
    }
    if let Ok(frame) = WatchFrame::decode(input) {
        assert_eq!(WatchFrame::decode(&frame.encode()).ok(), Some(frame));
    }
    if let Ok(request) = ManageRequest::decode(input) {
        assert_eq!(request.encode(), input);
    }
    if let Ok(answer) = ManageAnswer::decode(input) {
        assert_eq!(ManageAnswer::decode(&answer.encode()).ok(), Some(answer));
    }
}
