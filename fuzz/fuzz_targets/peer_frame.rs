//! What one node asks of another, and what it is answered.
//!
//! A frame that is accepted means the same when it is written and read again, and its lengths are bounded.

#![no_main]

use kvik_tier::peer::{PeerRequest, RangeAnswer, WantedRange};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    if let Some(request) = input.first_chunk().and_then(|frame| PeerRequest::decode(*frame)) {
        assert_eq!(PeerRequest::decode(request.encode()), Some(request));
        let (PeerRequest::Lookup { n_items } | PeerRequest::Read { n_items }) = request;
        assert!(n_items <= 4096);
    }
    if let Some(wanted) = input.first_chunk().and_then(WantedRange::decode) {
        assert_eq!(WantedRange::decode(&wanted.encode()), Some(wanted));
        assert!(wanted.n_bytes <= 1 << 32 && wanted.offset.checked_add(wanted.n_bytes).is_some());
    }
    if let Some(answer) = input.first_chunk().and_then(RangeAnswer::decode) {
        assert_eq!(RangeAnswer::decode(&answer.encode()), Some(answer));
        assert!(answer.n_bytes <= 1 << 32);
    }
    if let Ok(text) = std::str::from_utf8(input)
        && let Ok(address) = text.parse::<kvik_tier::PeerAddress>()
    {
        assert_eq!(address.to_string().parse::<kvik_tier::PeerAddress>().ok(), Some(address));
    }
});
