//! A request to the memory service and what it sends, as a hostile peer sends them.
//!
//! A frame that is accepted must be exactly what writing it again gives.

#![no_main]

use kvik_memory::service::frame::{FromServer, Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    check(input);
    // Random bytes rarely begin right; these do, so that the checks behind are reached.
    for magic in [b"KVMQ\x01\x00", b"KVMA\x01\x00", b"KVMN\x01\x00"] {
        let mut repaired = input.to_vec();
        if let Some(start) = repaired.get_mut(..magic.len()) {
            start.copy_from_slice(magic);
            check(&repaired);
        }
    }
});

fn check(input: &[u8]) {
    if let Ok(request) = Request::decode(input) {
        assert_eq!(request.encode(), input);
    }
    match FromServer::decode(input) {
        Ok(FromServer::Reply(reply)) => assert_eq!(reply.encode(), input),
        Ok(FromServer::Notice(notice)) => assert_eq!(notice.encode(), input),
        Err(_) => {}
    }
}
