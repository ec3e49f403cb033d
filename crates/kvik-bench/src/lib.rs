//! What measures kvik: benches, simulators, workloads and plots.
//!
//! - [`blend`], [`edges`], [`engine`], [`epp`], [`gateway`], [`index`], [`memory`], [`moving`], [`node`], [`planner`], [`sharing`], [`store`] and [`routing`] are the benches of
//!   `kvik bench`, one a subject. [`report`] is what they find, as a table and as JSON, with the [`machine`] it was found on.
//! - [`sim`] replays request traces through the eviction policies of the store, [`replay`] through the placement of
//!   requests, both in virtual time: equal arguments give equal figures.
//! - [`demo`] runs a fleet of real processes under load, with and without kvik's KV features. [`interrupt`] ends such processes
//!   when a signal comes.
//! - [`eval`] asks a model questions, to see what reuse costs in answers.
//! - [`workload`] is the synthetic fleet that indexes are measured with, [`plot`] draws curves as SVG.
//!
//! Nothing that serves requests depends on this crate; the `kvik` binary parses the arguments and prints.
//!
//! ```
//! use kvik_bench::sim::{Contender, simulate, synthetic::Chats};
//! use kvik_store::policy::PolicyKind;
//!
//! let chats = Chats { n_requests: 100, rate: 3.0, think_s: 30.0, next_turn: 0.8, seed: 1 };
//! let outcome = simulate(&chats.trace()?, PolicyKind::Lru, 1_000);
//! assert_eq!(outcome.contender, Contender::Policy(PolicyKind::Lru));
//! # Ok::<(), kvik_bench::sim::TraceError>(())
//! ```

#![forbid(unsafe_code)]

pub mod blend;
pub mod codec;
pub mod demo;
pub mod edges;
pub mod engine;
pub mod epp;
pub mod eval;
pub mod gateway;
pub mod index;
pub mod interrupt;
mod local_worker;
pub mod machine;
pub mod memory;
pub mod moving;
pub mod node;
pub mod planner;
pub mod plot;
pub mod replay;
pub mod report;
mod role;
pub mod routing;
pub mod sharing;
pub mod sim;
pub mod store;
mod stream;
pub mod workload;
