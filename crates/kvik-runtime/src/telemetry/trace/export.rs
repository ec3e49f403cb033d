//! The way of spans to the collector.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry_http::{HttpClient, HttpError};
use tokio::runtime::Handle;

/// Time for the collector to take a message.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest answer that is read, in bytes: it is empty, or says why spans were refused.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// Sends messages on the service's runtime; the exporter waits for them on a thread of its own.
#[derive(Debug)]
pub(super) struct OtlpClient {
    http: Client<HttpConnector, Full<Bytes>>,
    runtime: Handle,
    url: String,
    /// Whether the last message was not taken: a collector that is away is told of once.
    is_failing: AtomicBool,
}

impl OtlpClient {
    /// A client on the runtime that calls this.
    pub(super) fn new(url: String) -> Self {
        let http = Client::builder(TokioExecutor::new()).build_http();
        Self { http, runtime: Handle::current(), url, is_failing: AtomicBool::new(false) }
    }

    fn note(&self, outcome: Result<(), String>) {
        // Relaxed: one message at a time is sent.
        let was_failing = self.is_failing.swap(outcome.is_err(), Ordering::Relaxed);
        match outcome {
            Err(error) if !was_failing => {
                tracing::warn!(url = %self.url, %error, "the collector does not take traces; they are lost until it does");
            }
            Ok(()) if was_failing => tracing::info!(url = %self.url, "the collector takes traces again"),
            _ => {}
        }
    }
}

impl HttpClient for OtlpClient {
    fn send_bytes<'client, 'sending>(
        &'client self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'sending>>
    where
        'client: 'sending,
        Self: 'sending,
    {
        let http = self.http.clone();
        let sending = self.runtime.spawn(async move {
            let exchange = async {
                let response = http.request(request.map(Full::new)).await.map_err(|error| {
                    // The outer error only says that the client failed.
                    std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string)
                })?;
                let (parts, body) = response.into_parts();
                let body = Limited::new(body, MAX_ANSWER_BYTES)
                    .collect()
                    .await
                    .map_err(|error| error.to_string())?;
                Ok(Response::from_parts(parts, body.to_bytes()))
            };
            tokio::time::timeout(SEND_TIMEOUT, exchange)
                .await
                .unwrap_or_else(|_| Err(format!("no answer within {} s", SEND_TIMEOUT.as_secs())))
        });
        Box::pin(async move {
            let answer: Result<Response<Bytes>, String> =
                sending.await.unwrap_or_else(|_| Err("the service ends".to_owned()));
            self.note(match &answer {
                Ok(response) if response.status().is_success() => Ok(()),
                Ok(response) => Err(format!("it answered {}", response.status())),
                Err(error) => Err(error.clone()),
            });
            answer.map_err(HttpError::from)
        })
    }
}
