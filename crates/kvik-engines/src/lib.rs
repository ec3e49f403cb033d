//! The controller of engines: many models on one machine behind one gateway, of which some are awake.
//!
//! It starts the engines of a file, workers of kvik as well as servers of vLLM and SGLang, watches them, starts them again
//! when they break, and puts them to sleep and wakes them as requests come. `docs/engines.md` is its design.
//!
//! Parts, each on those named before it: `config` (the file), `process` (processes and their logs), `state_folder` (what the next
//! controller must know), `engine` (the state machine of all engines), `supervisor` (what the parts share), `calls` and `sleep`
//! (what engines are asked), `runner` (the task of one engine), `readiness` (requests of the gateway), `api`, `adoption`,
//! `controller` with `control`, its socket, and `client`, the other side of that.
//!
//! Invariants:
//!
//! * No engine is put to sleep while an answer of it is under way.
//! * A request for an engine that sleeps waits for it, is answered, or is refused with the reason.
//! * What a controller has started goes on when the controller is killed, and is found by the next one.

#![forbid(unsafe_code)]

mod actions;
mod adoption;
mod api;
mod calls;
mod client;
mod config;
mod control;
mod controller;
mod engine;
mod error;
mod memory;
mod metrics;
mod process;
mod readiness;
mod runner;
mod sleep;
mod state_folder;
mod status;
mod supervisor;
mod traffic;

pub use client::ControllerClient;
pub use config::{
    EngineConfig, EngineKind, EngineMemory, EnginesConfig, LogConfig, MemoryConfig, SleepMethod, VllmSleep,
};
pub use control::start_controller;
pub use controller::{Controller, ControllerOptions};
pub use error::{EnginesError, Result};
pub use state_folder::default_state_folder;
pub use status::{ControllerStatus, EngineStatus};
