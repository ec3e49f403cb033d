//! What a client of LMCache's plain remote protocol asks, and what it is answered.
//!
//! A frame that is accepted means the same when it is written and read again, and its lengths are bounded.

#![no_main]

use kvik_tier::{LM_KEY_BYTES, LM_MAX_VALUE_BYTES, LmKey, LmReply, LmRequest, LmUrl};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    if let Some(request) = input.first_chunk().and_then(LmRequest::decode) {
        assert_eq!(LmRequest::decode(&request.encode()), Some(request));
        assert!(request.n_bytes <= LM_MAX_VALUE_BYTES);
        let key = request.key.as_str();
        assert!((1..=LM_KEY_BYTES).contains(&key.len()) && LmKey::new(key) == Some(request.key));
    }
    if let Some(reply) = input.first_chunk().and_then(LmReply::decode) {
        assert_eq!(LmReply::decode(&reply.encode()), Some(reply));
        assert!(reply.n_bytes <= LM_MAX_VALUE_BYTES);
    }
    if let Ok(text) = std::str::from_utf8(input) {
        if let Ok(url) = text.parse::<LmUrl>() {
            assert_eq!(url.to_string().parse::<LmUrl>().ok(), Some(url));
        }
        // Whatever it is, it is an address or refused.
        let _ = text.parse::<kvik_tier::PluginUrl>();
    }
});
