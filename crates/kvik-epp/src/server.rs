//! The gRPC services of a picker.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream;
use kvik_indexer::grpc::accept;
use kvik_runtime::shutdown::Shutdown;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::{Grpc, StreamingService};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::config::EppConfig;
use crate::health::{CHECK_PATH, Check, Health, HealthCheckRequest, HealthCheckResponse, WATCH_PATH, Watch};
use crate::messages::{PROCESS_PATH, ProcessingRequest, ProcessingResponse};
use crate::stream::{Answers, Processor};

/// Most bytes of the headers of a call.
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// Time between two signs of life that a silent data plane is asked for, and time for it to give one.
const KEEPALIVE: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(10)];
/// Bytes that an exchange may send before it is read: a usual long prompt needs no second round trip.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// The same for all exchanges of a connection together, which bounds what waits in memory.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// The services, a call at a time.
#[derive(Clone)]
struct Services {
    processor: Arc<Processor>,
    health: Health,
    exchanges: Arc<Semaphore>,
    max_message_bytes: usize,
}

/// Serves data planes until `shutdown` drains; what runs then is finished, or dropped when it stops.
pub(crate) async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    processor: Arc<Processor>,
    health: Health,
    config: EppConfig,
    shutdown: Shutdown,
) {
    let (accepted, mut connections) = mpsc::channel(1);
    let bounds = (config.max_connections as usize, config.handshake_timeout());
    let accepting = accept(listener, tls, bounds, accepted, shutdown.clone());
    let incoming = stream::poll_fn(move |context| connections.poll_recv(context));
    let services = Services {
        processor,
        health,
        exchanges: Arc::new(Semaphore::new(config.max_exchanges as usize)),
        max_message_bytes: config.max_message_bytes as usize,
    };
    let serving = tonic::transport::Server::builder()
        .max_concurrent_streams(u32::try_from(config.max_exchanges).unwrap_or(u32::MAX))
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keepalive_interval(Some(KEEPALIVE[0]))
        .http2_keepalive_timeout(Some(KEEPALIVE[1]))
        .serve_with_incoming_shutdown(services, incoming, shutdown.draining());
    tokio::select! {
        ((), served) = async { tokio::join!(accepting, serving) } => if let Err(error) = served {
            tracing::error!(%error, "failed to serve data planes");
        },
        () = shutdown.stopping() => {}
    }
}

impl Service<http::Request<Body>> for Services {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match request.uri().path() {
            PROCESS_PATH => {
                let Ok(permit) = Arc::clone(&self.exchanges).try_acquire_owned() else {
                    let status = Status::resource_exhausted("too many requests are under way; try again");
                    return std::future::ready(Ok(status.into_http())).boxed();
                };
                let process = Process { processor: Arc::clone(&self.processor), permit: Some(permit) };
                let mut grpc = Grpc::new(ProstCodec::<ProcessingResponse, ProcessingRequest>::default())
                    .max_decoding_message_size(self.max_message_bytes);
                async move { Ok(grpc.streaming(process, request).await) }.boxed()
            }
            CHECK_PATH => {
                let check = Check(self.health.clone());
                let mut grpc = Grpc::new(ProstCodec::<HealthCheckResponse, HealthCheckRequest>::default());
                async move { Ok(grpc.unary(check, request).await) }.boxed()
            }
            WATCH_PATH => {
                let watch = Watch(self.health.clone());
                let mut grpc = Grpc::new(ProstCodec::<HealthCheckResponse, HealthCheckRequest>::default());
                async move { Ok(grpc.server_streaming(watch, request).await) }.boxed()
            }
            path => {
                let message = format!(
                    "there is no {path}; the calls are {PROCESS_PATH}, {CHECK_PATH} and {WATCH_PATH}"
                );
                std::future::ready(Ok(Status::unimplemented(message).into_http())).boxed()
            }
        }
    }
}

/// The call of data planes.
struct Process {
    processor: Arc<Processor>,
    /// Taken by the only call.
    permit: Option<OwnedSemaphorePermit>,
}

impl StreamingService<ProcessingRequest> for Process {
    type Response = ProcessingResponse;
    type ResponseStream = Answers;
    type Future = BoxFuture<'static, Result<Response<Answers>, Status>>;

    fn call(&mut self, request: Request<Streaming<ProcessingRequest>>) -> Self::Future {
        let answers = self.permit.take().map(|permit| {
            let processor = Arc::clone(&self.processor);
            Response::new(processor.process(request.into_inner(), permit))
        });
        std::future::ready(answers.ok_or_else(|| Status::internal("called twice"))).boxed()
    }
}
