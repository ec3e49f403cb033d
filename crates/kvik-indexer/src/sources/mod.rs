//! Sources of events: engines over `ZeroMQ`, workers of kvik over HTTP.

pub mod engine;
pub mod kubernetes;
pub mod pause;
pub mod worker;
mod zmq;
