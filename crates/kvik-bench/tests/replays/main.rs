//! The simulators on requests whose course is known beforehand.

mod replay;
mod simulation;
