//! The engines: which is awake ([`machine`]), and what is known of each ([`handle`]).

pub(crate) mod handle;
pub(crate) mod machine;
