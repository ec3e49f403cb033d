//! `grpc.health.v1.Health`: whether the picker lives, and whether it can choose.

use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::{self, BoxStream};
use kvik_runtime::shutdown::Shutdown;
use tokio::sync::watch;
use tonic::server::{ServerStreamingService, UnaryService};
use tonic::{Request, Response, Status};

use crate::messages::PROCESS_SERVICE;

/// The path of the call that answers once.
pub const CHECK_PATH: &str = "/grpc.health.v1.Health/Check";
/// The path of the call that answers at every change.
pub const WATCH_PATH: &str = "/grpc.health.v1.Health/Watch";

/// Which service is asked for.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct HealthCheckRequest {
    /// `liveness`, `readiness`, the name of the service for data planes, or nothing for the whole picker.
    #[prost(string, tag = "1")]
    pub service: String,
}

/// How a service does.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct HealthCheckResponse {
    /// Its status.
    #[prost(enumeration = "ServingStatus", tag = "1")]
    pub status: i32,
}

/// How a service does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum ServingStatus {
    /// It is not known.
    Unknown = 0,
    /// It answers.
    Serving = 1,
    /// It does not answer now.
    NotServing = 2,
    /// There is no such service.
    ServiceUnknown = 3,
}

/// Whether the picker can choose.
#[derive(Debug, Clone)]
pub(crate) struct Health {
    /// Whether the engines are known.
    is_synced: watch::Receiver<bool>,
    shutdown: Shutdown,
}

impl Health {
    pub(crate) fn new(is_synced: watch::Receiver<bool>, shutdown: Shutdown) -> Self {
        Self { is_synced, shutdown }
    }

    fn status(&self, service: &str) -> ServingStatus {
        let is_ready = *self.is_synced.borrow() && !self.shutdown.is_draining();
        match service {
            "liveness" => ServingStatus::Serving,
            "" | "readiness" | PROCESS_SERVICE if is_ready => ServingStatus::Serving,
            "" | "readiness" | PROCESS_SERVICE => ServingStatus::NotServing,
            _ => ServingStatus::ServiceUnknown,
        }
    }

    /// Waits until the status of a service is another one than `before`; `None` once the picker ends.
    async fn changed(&mut self, service: &str, before: ServingStatus) -> Option<ServingStatus> {
        loop {
            let status = self.status(service);
            if status != before {
                return Some(status);
            }
            if self.shutdown.is_draining() {
                return None;
            }
            tokio::select! {
                // Without a sender it stays as it is.
                Ok(()) = self.is_synced.changed() => {}
                () = self.shutdown.draining() => {}
            }
        }
    }
}

/// Answers once.
#[derive(Debug, Clone)]
pub(crate) struct Check(pub(crate) Health);

impl UnaryService<HealthCheckRequest> for Check {
    type Response = HealthCheckResponse;
    type Future = BoxFuture<'static, Result<Response<HealthCheckResponse>, Status>>;

    fn call(&mut self, request: Request<HealthCheckRequest>) -> Self::Future {
        let service = request.into_inner().service;
        let answer = match self.0.status(&service) {
            ServingStatus::ServiceUnknown => {
                let message = format!(
                    "there is no service `{service}`; allowed: liveness, readiness, {PROCESS_SERVICE}"
                );
                Err(Status::not_found(message))
            }
            status => Ok(Response::new(HealthCheckResponse { status: status.into() })),
        };
        std::future::ready(answer).boxed()
    }
}

/// Answers at once and at every change.
#[derive(Debug, Clone)]
pub(crate) struct Watch(pub(crate) Health);

impl ServerStreamingService<HealthCheckRequest> for Watch {
    type Response = HealthCheckResponse;
    type ResponseStream = BoxStream<'static, Result<HealthCheckResponse, Status>>;
    type Future = BoxFuture<'static, Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<HealthCheckRequest>) -> Self::Future {
        let state = (self.0.clone(), request.into_inner().service, None);
        let statuses = stream::unfold(state, async |(mut health, service, before)| {
            let status = match before {
                None => health.status(&service),
                Some(before) => health.changed(&service, before).await?,
            };
            let answer = Ok(HealthCheckResponse { status: status.into() });
            Some((answer, (health, service, Some(status))))
        });
        std::future::ready(Ok(Response::new(statuses.boxed()))).boxed()
    }
}
