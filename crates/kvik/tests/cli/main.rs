//! Runs the binary as a user does and pins what it answers.

#![expect(clippy::unwrap_used, reason = "the helpers are tests too: what they cannot do ends the test")]

mod bad_input;
mod bad_models;
mod bench_codec;
mod bench_edges;
mod bench_engine;
mod bench_epp;
mod bench_gateway;
mod bench_memory;
mod bench_moving;
mod configuration;
mod demo;
mod documents;
mod eval;
mod generate;
mod help;
mod models_inspect;
mod sim;
mod support;
