//! The way of spans to the collector.

use std::error::Error as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body_util::{BodyExt as _, Collected, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry_http::{HttpClient, HttpError};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio::runtime::Handle;

use super::config::{Collector, OtlpProtocol};
use crate::error::{Result, RuntimeError};
use crate::tls::TlsClientPem;

/// Time for the collector to take a message.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest answer that is read, in bytes: it is empty, or says why spans were refused.
const MAX_ANSWER_BYTES: usize = 64 << 10;
/// What stands before a message of gRPC: whether it is compressed, and its length.
const GRPC_PREFIX_BYTES: usize = 5;

/// Sends messages on the service's runtime; the exporter waits for them on a thread of its own.
#[derive(Debug)]
pub(super) struct OtlpClient {
    http: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    runtime: Handle,
    url: String,
    protocol: OtlpProtocol,
    headers: HeaderMap,
    /// Whether the last message was not taken: a collector that is away is logged once.
    is_failing: AtomicBool,
}

impl OtlpClient {
    /// A client on the runtime that calls this.
    ///
    /// # Errors
    /// If a PEM cannot be used.
    pub(super) fn new(collector: Collector) -> Result<Self> {
        let Collector { url, protocol, headers, is_secure, tls } = collector;
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        let builder =
            HttpsConnectorBuilder::new().with_tls_config(tls_config(&tls, is_secure)?).https_or_http();
        let mut client = Client::builder(TokioExecutor::new());
        let http = match protocol {
            OtlpProtocol::Http => client.build(builder.enable_http1().wrap_connector(connector)),
            OtlpProtocol::Grpc => {
                client.http2_only(true).build(builder.enable_http2().wrap_connector(connector))
            }
        };
        let is_failing = AtomicBool::new(false);
        Ok(Self { http, runtime: Handle::current(), url, protocol, headers, is_failing })
    }

    fn note(&self, outcome: std::result::Result<(), String>) {
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
        mut request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = std::result::Result<Response<Bytes>, HttpError>> + Send + 'sending>>
    where
        'client: 'sending,
        Self: 'sending,
    {
        let (http, protocol) = (self.http.clone(), self.protocol);
        request.headers_mut().extend(self.headers.clone());
        if protocol == OtlpProtocol::Grpc {
            request = grpc_request(request);
        }
        let sending = self.runtime.spawn(async move {
            let exchange = async {
                let response = http.request(request.map(Full::new)).await.map_err(|error| {
                    // The outer error only says that the client failed.
                    error.source().map_or(error.to_string(), ToString::to_string)
                })?;
                let (parts, body) = response.into_parts();
                let body = Limited::new(body, MAX_ANSWER_BYTES)
                    .collect()
                    .await
                    .map_err(|error| error.to_string())?;
                let body = match protocol {
                    OtlpProtocol::Grpc if parts.status.is_success() => grpc_answer(&parts.headers, body)?,
                    _ => body.to_bytes(),
                };
                Ok(Response::from_parts(parts, body))
            };
            tokio::time::timeout(SEND_TIMEOUT, exchange)
                .await
                .unwrap_or_else(|_| Err(format!("no answer within {} s", SEND_TIMEOUT.as_secs())))
        });
        Box::pin(async move {
            let answer: std::result::Result<Response<Bytes>, String> =
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

/// A message as gRPC frames it.
fn grpc_request(request: Request<Bytes>) -> Request<Bytes> {
    let (mut parts, body) = request.into_parts();
    parts.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    parts.headers.insert(header::TE, HeaderValue::from_static("trailers"));
    // The exporter counted the body without its prefix.
    parts.headers.remove(header::CONTENT_LENGTH);
    let mut framed = BytesMut::with_capacity(GRPC_PREFIX_BYTES + body.len());
    framed.put_u8(0);
    // A batch has some hundred kilobytes.
    framed.put_u32(u32::try_from(body.len()).unwrap_or(u32::MAX));
    framed.put(body);
    Request::from_parts(parts, framed.freeze())
}

/// The message of an answer of gRPC; an error says what the collector said.
fn grpc_answer(headers: &HeaderMap, body: Collected<Bytes>) -> std::result::Result<Bytes, String> {
    // An answer without a message has its outcome in its headers.
    let trailers = body.trailers().unwrap_or(headers);
    let text = |name: &str| trailers.get(name).and_then(|value| value.to_str().ok());
    match text("grpc-status") {
        Some("0") => {}
        Some(status) => {
            return Err(format!(
                "it answered gRPC status {status}: {}",
                text("grpc-message").unwrap_or_default()
            ));
        }
        None => return Err("its answer has no gRPC status".to_owned()),
    }
    let mut message = body.to_bytes();
    message.advance(GRPC_PREFIX_BYTES.min(message.len()));
    Ok(message)
}

/// How TLS is spoken: with the authorities of `tls`, or those of the system if there are none.
fn tls_config(tls: &TlsClientPem, is_secure: bool) -> Result<ClientConfig> {
    let unusable = |what: &str, error: &dyn std::fmt::Display| {
        RuntimeError::Telemetry(format!("read `tracing.tls.{what}`: {error}"))
    };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&tls.authorities_pem) {
        let certificate = certificate.map_err(|error| unusable("authorities", &error))?;
        roots.add(certificate).map_err(|error| unusable("authorities", &error))?;
    }
    if is_secure && tls.authorities_pem.is_empty() {
        // A system's store may have certificates that are not understood; the others still count.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| RuntimeError::Telemetry(error.to_string()))?
        .with_root_certificates(roots);
    let Some((chain, key)) = &tls.identity_pem else { return Ok(builder.with_no_client_auth()) };
    let chain: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(chain).collect();
    let chain = chain.map_err(|error| unusable("certificate", &error))?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| unusable("key", &error))?;
    builder.with_client_auth_cert(chain, key).map_err(|error| unusable("certificate", &error))
}
