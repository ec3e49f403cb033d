//! The gateway: one address for all models, an OpenAI-compatible API, and a worker for each request.
//!
//! A streaming proxy. A body goes on as it came, unless its request is parted between engines. It looks at a request for what routing needs,
//! chooses the worker that most likely has the prompt's KV, and passes the answer on frame by
//! frame. Workers come from a coordinator's snapshots; other engines that speak the `OpenAI` API are
//! configured by their address.
//!
//! Parts, in the order a request meets them: `api` (the routes), `request` (API key, headers, body and what routing
//! reads of them), `placement` (admission, the index, the choice of a worker), `disaggregation` (prompts that another engine computes), `upstream` (the workers: membership,
//! connections, health), `answer` (the way to a worker and back, until the last byte). Beside them `ui`, the web page, and `picker`, which chooses workers for
//! requests that another data plane sends.
//!
//! Invariants:
//!
//! * Load, permit and gauges belong to guards that live in the answer's body: they are back to zero
//!   when no request is open, however requests end.
//! * A request is tried again only before the first byte of its answer.
//! * A stream of events ends complete or with an event that says why not.
//! * Nothing here depends on the coordinator being there; only changes of members do.
//! * Neither prompts nor keys are logged.
//!
//! ```no_run
//! use kvik_gateway::{Gateway, GatewayConfig};
//! use kvik_runtime::shutdown::Shutdown;
//!
//! # async fn example() -> kvik_gateway::Result<()> {
//! let mut config = GatewayConfig::default();
//! config.coordinators.push("http://127.0.0.1:8081".to_owned());
//! let running = Gateway::start(config, &Shutdown::new()).await?;
//! println!("listening on {}", running.address());
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod answer;
mod api;
mod config;
mod disaggregation;
mod error;
mod gateway;
mod held;
mod held_book;
mod management;
mod metrics;
mod picker;
mod placement;
mod request;
mod route;
mod state;
mod ui;
mod upstream;

pub use api::OPENAPI;
pub use config::{
    AdmissionConfig, ApiKeyConfig, BackendConfig, BreakerConfig, DisaggregationConfig, GatewayConfig,
    HealthConfig, PdProtocol, RetryConfig, Role, RoutingConfig, TimeoutConfig, UiConfig,
};
pub use error::{GatewayError, Result};
pub use gateway::{Gateway, Running, WorkerStatus};
pub use management::{Management, ModelUse, NotReady, Readiness};
pub use picker::{PickRefusal, PickRequest, Picked, Picker};
#[doc(hidden)]
pub use request::splice::{Edit, splice_bytes};
