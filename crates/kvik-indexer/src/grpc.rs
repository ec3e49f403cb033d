//! `indexer.v1.IndexerService` over gRPC, as clients of llm-d's indexer know it.
//!
//! `proto/indexer.v1.proto` describes it for clients. The messages here are written by hand after it, so that
//! a build needs no compiler for them.

mod connections;
mod limits;

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream;
use kvik_runtime::shutdown::Shutdown;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::{Grpc, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use crate::error::{IndexerError, Result};

pub use connections::{Connection, accept};
pub use limits::GrpcLimits;

/// The path of the only call.
pub const GET_POD_SCORES_PATH: &str = "/indexer.v1.IndexerService/GetPodScores";

/// Most bytes of the headers of a call.
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// Time between two signs of life that a silent client is asked for, and time for it to give one.
const KEEPALIVE: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(10)];

/// What [`GET_POD_SCORES_PATH`] takes.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct GetPodScoresRequest {
    /// The prompt as text.
    #[prost(string, tag = "1")]
    pub prompt: String,
    /// The model, as requests name it.
    #[prost(string, tag = "2")]
    pub model_name: String,
    /// The only pods to score; none means all.
    #[prost(string, repeated, tag = "3")]
    pub pod_identifiers: Vec<String>,
}

/// What [`GET_POD_SCORES_PATH`] answers.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GetPodScoresResponse {
    /// The pods that have any of the prompt, highest score first.
    #[prost(message, repeated, tag = "1")]
    pub scores: Vec<PodScore>,
}

/// How much of a prompt a pod has.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PodScore {
    /// The pod.
    #[prost(string, tag = "1")]
    pub pod: String,
    /// Its score.
    #[prost(double, tag = "2")]
    pub score: f64,
    /// The data parallel rank, where a pod has several.
    #[prost(int32, optional, tag = "3")]
    pub data_parallel_rank: Option<i32>,
}

/// Scores pods for prompts.
pub trait PodScores: Send + Sync {
    /// Scores the pods that have any of a prompt, in any order; `pods` are the only ones to score, and none
    /// means all.
    ///
    /// # Errors
    /// [`IndexerError::Invalid`] names the field of the request that cannot be used.
    fn scores<'a>(
        &'a self,
        prompt: &'a str,
        model: &'a str,
        pods: &'a [String],
    ) -> BoxFuture<'a, Result<Vec<PodScore>>>;
}

/// Decides which calls are answered.
pub trait CallGuard: Send + Sync {
    /// Whether a call with these headers is.
    fn admits(&self, headers: &http::HeaderMap) -> bool;
}

/// Serves the calls of a listener that `guard` admits, within `limits`, until `shutdown` drains; what runs then is finished, or
/// dropped when it stops.
///
/// # Errors
/// [`IndexerError::Unavailable`] if the listener fails.
pub async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    scores: Arc<dyn PodScores>,
    guard: Arc<dyn CallGuard>,
    limits: &GrpcLimits,
    shutdown: Shutdown,
) -> Result<()> {
    let (accepted, mut connections) = mpsc::channel(1);
    let bounds = (limits.max_connections as usize, limits.handshake_timeout());
    let accepting = connections::accept(listener, tls, bounds, accepted, shutdown.clone());
    let incoming = stream::poll_fn(move |context| connections.poll_recv(context));
    let calls = Arc::new(Semaphore::new(limits.max_calls as usize));
    let service =
        IndexerService { scores, guard, limits: Arc::new(limits.clone()), calls, shutdown: shutdown.clone() };
    let serving = tonic::transport::Server::builder()
        .max_concurrent_streams(limits.max_connection_calls as u32)
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .http2_keepalive_interval(Some(KEEPALIVE[0]))
        .http2_keepalive_timeout(Some(KEEPALIVE[1]))
        .serve_with_incoming_shutdown(service, incoming, shutdown.draining());
    tokio::select! {
        ((), served) = async { tokio::join!(accepting, serving) } => served.map_err(|error| IndexerError::Unavailable {
            operation: "serve gRPC",
            reason: error.to_string(),
        }),
        () = shutdown.stopping() => Ok(()),
    }
}

/// The service, a call at a time.
#[derive(Clone)]
struct IndexerService {
    scores: Arc<dyn PodScores>,
    guard: Arc<dyn CallGuard>,
    limits: Arc<GrpcLimits>,
    calls: Arc<Semaphore>,
    shutdown: Shutdown,
}

impl Service<http::Request<Body>> for IndexerService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let refuse = |status: Status| std::future::ready(Ok(status.into_http())).boxed();
        if !self.guard.admits(request.headers()) {
            let message = "this call needs a key as `authorization: Bearer KEY`, or the cluster token";
            return refuse(Status::unauthenticated(message));
        }
        if request.uri().path() != GET_POD_SCORES_PATH {
            let message =
                format!("there is no {}; the only call is {GET_POD_SCORES_PATH}", request.uri().path());
            return refuse(Status::unimplemented(message));
        }
        let Ok(permit) = Arc::clone(&self.calls).try_acquire_owned() else {
            let message = format!("{} calls run already; try again", self.limits.max_calls);
            return refuse(Status::resource_exhausted(message));
        };
        let method = GetPodScores { scores: Arc::clone(&self.scores) };
        let (limits, shutdown) = (Arc::clone(&self.limits), self.shutdown.clone());
        let answer = async move {
            let mut grpc = Grpc::new(ProstCodec::<GetPodScoresResponse, GetPodScoresRequest>::default())
                .max_decoding_message_size(limits.message_bytes())
                .max_encoding_message_size(limits.message_bytes());
            // A connection is a task of its own that outlives the server's, so each call must see the end itself.
            tokio::select! {
                answer = grpc.unary(method, request) => Ok(answer),
                () = shutdown.stopping() => Ok(Status::unavailable("the service ends").into_http()),
                () = tokio::time::sleep(limits.call_timeout()) => {
                    Ok(Status::deadline_exceeded("the call took too long").into_http())
                }
            }
        };
        let answer = answer.inspect(move |_| drop(permit));
        answer.boxed()
    }
}

/// The only call.
struct GetPodScores {
    scores: Arc<dyn PodScores>,
}

impl UnaryService<GetPodScoresRequest> for GetPodScores {
    type Response = GetPodScoresResponse;
    type Future = BoxFuture<'static, Result<Response<GetPodScoresResponse>, Status>>;

    fn call(&mut self, request: Request<GetPodScoresRequest>) -> Self::Future {
        let scores = Arc::clone(&self.scores);
        let answer = async move {
            let GetPodScoresRequest { prompt, model_name, pod_identifiers } = request.into_inner();
            if model_name.is_empty() {
                return Err(Status::invalid_argument("`model_name` is empty; allowed: the name of a model"));
            }
            let scores = scores.scores(&prompt, &model_name, &pod_identifiers).await;
            let mut scores = scores.map_err(|error| as_status(&error))?;
            scores.sort_by(|a, b| b.score.total_cmp(&a.score));
            Ok(Response::new(GetPodScoresResponse { scores }))
        };
        answer.boxed()
    }
}

fn as_status(error: &IndexerError) -> Status {
    match error {
        IndexerError::Invalid { .. } | IndexerError::Tokens(_) => Status::invalid_argument(error.to_string()),
        IndexerError::Unavailable { .. } => Status::unavailable(error.to_string()),
        IndexerError::Index(_) | IndexerError::Runtime(_) => Status::resource_exhausted(error.to_string()),
    }
}
