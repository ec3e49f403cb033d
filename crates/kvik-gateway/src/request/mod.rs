//! What a client sends: its key, headers and body, and what routing reads of them.

pub(crate) mod api_keys;
pub(crate) mod body;
pub(crate) mod headers;
pub(crate) mod peek;
pub(crate) mod prompt;
pub(crate) mod routing_key;
pub(crate) mod splice;
