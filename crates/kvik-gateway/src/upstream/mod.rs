//! The workers and engines behind the gateway: which there are, how they are reached, whether they answer.

pub(crate) mod backend;
pub(crate) mod breaker;
pub(crate) mod exchange;
pub(crate) mod fleet;
pub(crate) mod kv_listeners;
pub(crate) mod links;
pub(crate) mod members;
pub(crate) mod probe;
pub(crate) mod speed;
pub(crate) mod watch;
