//! Replays request traces through the policies.
//!
//! [`Trace::read`] reads a trace, [`simulate`] runs it through a policy or the [`optimum`] at a capacity,
//! and [`Report`] puts many runs side by side as a table, as JSON and as a plot.
//!
//! A hit is a block of the longest prefix of a request that is resident when the request comes; all
//! blocks of the request are the whole. A request is one instant: its blocks are looked up and, where the
//! policy admits them, stored at its timestamp.

mod optimum;
mod replay;
mod report;
pub mod synthetic;
mod trace;

pub use optimum::optimum;
pub use replay::simulate;
pub use report::{Contender, Outcome, Report};
pub use trace::{TOKENS_PER_BLOCK, Trace, TraceError, TraceRequest};
