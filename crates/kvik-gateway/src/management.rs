//! What a program that starts and stops engines says of a model before a request for it is placed.
//!
//! A gateway alone has no such program: its backends are there or are not. A controller of engines manages models, whose
//! engines may sleep: every request for a managed model is counted from here to the last byte of its answer, and waits until
//! the model's engine can take it. So an engine never sleeps while an answer of it is under way, and a request for
//! an engine that sleeps waits instead of failing.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use axum::Router;

/// A program in this process that starts and stops the engines of models.
#[derive(Debug, Clone)]
pub struct Management {
    /// Asked before a request for a managed model is placed.
    pub readiness: Arc<dyn Readiness>,
    /// The models that it manages when the gateway begins to serve.
    pub models: Vec<String>,
    /// Served beside the gateway's own.
    pub routes: Router,
    /// The same, for administrators only.
    pub admin_routes: Router,
}

/// Makes models ready for requests.
pub trait Readiness: Debug + Send + Sync {
    /// Counts a request for `model` for as long as the returned use lives; `None` if it does not manage the model.
    fn begin(&self, model: &str) -> Option<Box<dyn ModelUse>>;
}

/// The use of a managed model by one request, until it is dropped.
pub trait ModelUse: Debug + Send + Sync {
    /// Lets the request in if its model is ready now; from then on its backend stays until the use is dropped.
    fn try_enter(&mut self) -> bool;

    /// Waits until the request is let in. Cancel safe.
    fn enter(&mut self) -> Pin<Box<dyn Future<Output = Result<(), NotReady>> + Send + '_>>;

    /// Notes how the request ended.
    fn end(&mut self, is_success: bool);
}

/// Why a request is not let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotReady {
    /// What the client is told.
    pub message: String,
    /// When it may try again, in seconds.
    pub retry_after_s: u64,
    /// Whether it is refused because too many others wait.
    pub is_full: bool,
}
