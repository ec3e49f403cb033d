//! Texts that name blocks, sizes and dtypes: from flags, config files and other services.
//!
//! What is accepted must survive being printed and read again.

#![no_main]

use kvik_types::{BlockHash, ByteSize, Dtype};
use libfuzzer_sys::fuzz_target;

/// Units above TiB are printed but not read.
const LARGEST_READABLE: u64 = 1023 << 40;

fuzz_target!(|text: &str| {
    if let Ok(hash) = text.parse::<BlockHash>() {
        assert_eq!(hash.to_string().parse::<BlockHash>().ok(), Some(hash));
        assert_eq!(text.to_ascii_lowercase(), hash.to_string());
    }
    if let Ok(dtype) = text.parse::<Dtype>() {
        assert_eq!(dtype.to_string().parse::<Dtype>().ok(), Some(dtype));
    }
    if let Ok(size) = text.parse::<ByteSize>()
        && size.bytes() < LARGEST_READABLE
    {
        // One decimal is printed, so the size that is read again may be 5% off.
        let again = size.to_string().parse::<ByteSize>().expect("a printed size can be read");
        assert!(again.bytes().abs_diff(size.bytes()) <= size.bytes() / 20 + 1, "{text}: {size}");
    }
});
