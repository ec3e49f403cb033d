//! Replies of an untrusted Redis server.

#![no_main]

use kvik_tier::{Reply, ReplyReader, ValueReply};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (Vec<u16>, &[u8])| {
    let (questions, bytes) = input;
    let mut reader = ReplyReader::new(bytes);
    for question in questions {
        // An even question is one for a small reply, an odd one for a value of so many bytes.
        let is_error = if question % 2 == 0 {
            reader.read_reply().is_err()
        } else {
            let mut buffer = vec![0; usize::from(question / 2)];
            match reader.read_value(&mut buffer) {
                Ok(ValueReply::OtherLength(n_bytes)) => {
                    assert_ne!(n_bytes, buffer.len() as u64);
                    false
                }
                result => result.is_err(),
            }
        };
        if is_error {
            return;
        }
    }
    // What is announced is not what is taken: a reply that was read was sent.
    if let Ok(Reply::Array(replies)) = ReplyReader::new(bytes).read_reply() {
        assert!(replies.len() <= bytes.len());
    }
});
