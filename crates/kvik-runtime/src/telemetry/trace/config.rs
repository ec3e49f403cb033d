//! Where the traces of a service go.

use std::fmt;

use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};

use crate::error::{Result, RuntimeError};
use crate::secret::{Secret, redacted_url};
use crate::tls::{TlsClientFiles, TlsClientPem};

/// Where a collector takes traces over HTTP.
pub(super) const HTTP_PATH: &str = "/v1/traces";
/// Where a collector takes traces over gRPC.
pub(super) const GRPC_PATH: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
/// How headers are written.
const HEADERS_ALLOWED: &str = "name=value,name=value";

/// Where the traces of a service go.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TracingConfig {
    /// Base address of a collector that takes OTLP, such as `http://127.0.0.1:4318` or `https://collector:4317`.
    /// `OTEL_EXPORTER_OTLP_ENDPOINT` in the environment sets it too. Default: none, no traces.
    pub otlp_endpoint: Option<String>,
    /// `http/protobuf` or `grpc`. `OTEL_EXPORTER_OTLP_PROTOCOL` in the environment sets it too. Default:
    /// `http/protobuf`.
    pub otlp_protocol: OtlpProtocol,
    /// Headers of every message, such as `authorization=Bearer%20abc,x-scope=main`; values may be percent-encoded.
    /// `OTEL_EXPORTER_OTLP_HEADERS` in the environment sets it too. Default: none.
    pub otlp_headers: Option<Secret>,
    /// TLS towards a collector at `https://`. Default: none, the authorities of the system are trusted.
    pub tls: TlsClientFiles,
    /// Share of the traces that begin here and are recorded, 0 to 1; a trace that began elsewhere is
    /// recorded if it is there. Default: 1.
    pub sampling_ratio: f64,
}

/// How messages reach a collector.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OtlpProtocol {
    /// HTTP/1.1 with protobuf bodies.
    #[default]
    #[serde(rename = "http/protobuf")]
    Http,
    /// gRPC, over HTTP/2.
    #[serde(rename = "grpc")]
    Grpc,
}

/// A collector, as the configuration describes it.
#[derive(Clone)]
pub(super) struct Collector {
    /// The address of its call.
    pub(super) url: String,
    pub(super) protocol: OtlpProtocol,
    pub(super) headers: HeaderMap,
    /// Whether it is spoken to over TLS.
    pub(super) is_secure: bool,
    pub(super) tls: TlsClientPem,
}

impl Default for TracingConfig {
    fn default() -> Self {
        Self {
            otlp_endpoint: None,
            otlp_protocol: OtlpProtocol::default(),
            otlp_headers: None,
            tls: TlsClientFiles::default(),
            sampling_ratio: 1.0,
        }
    }
}

impl TracingConfig {
    /// The collector; `None` without an endpoint.
    ///
    /// # Errors
    /// If a value is not allowed, or a file of `tls` cannot be read.
    pub(super) fn collector(&self) -> Result<Option<Collector>> {
        if !(0.0..=1.0).contains(&self.sampling_ratio) {
            return Err(invalid("sampling_ratio", &self.sampling_ratio, "0 to 1"));
        }
        let Some(endpoint) = self.otlp_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty()) else {
            return Ok(None);
        };
        let is_base = |uri: &Uri| {
            matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.host().is_some_and(|host| !host.is_empty())
                && uri.query().is_none()
                && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
        };
        let Some(uri) = endpoint.parse::<Uri>().ok().filter(is_base) else {
            let allowed = "http://host:port or https://host:port";
            return Err(invalid("otlp_endpoint", &redacted_url(endpoint), allowed));
        };
        let path = match self.otlp_protocol {
            OtlpProtocol::Http => HTTP_PATH,
            OtlpProtocol::Grpc => GRPC_PATH,
        };
        Ok(Some(Collector {
            url: format!("{}{path}", endpoint.trim_end_matches('/')),
            protocol: self.otlp_protocol,
            headers: self.headers()?,
            is_secure: uri.scheme_str() == Some("https"),
            tls: self.tls.read()?,
        }))
    }

    /// The headers of every message. An error names the header, never its value.
    fn headers(&self) -> Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        let text = self.otlp_headers.as_ref().map_or("", Secret::expose);
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let Some((name, value)) = pair.split_once('=') else {
                return Err(invalid("otlp_headers", &"a list with an entry without `=`", HEADERS_ALLOWED));
            };
            let name = name.trim();
            let refuse = |name: &str| {
                let value = format!("a list whose header {name:?} cannot be sent");
                invalid("otlp_headers", &value, HEADERS_ALLOWED)
            };
            let value = percent_decode_str(value.trim()).decode_utf8().map_err(|_| refuse(name))?;
            let mut value = HeaderValue::try_from(&*value).map_err(|_| refuse(name))?;
            value.set_sensitive(true);
            headers.insert(HeaderName::try_from(name).map_err(|_| refuse(name))?, value);
        }
        Ok(headers)
    }
}

impl fmt::Display for OtlpProtocol {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Http => "http/protobuf",
            Self::Grpc => "grpc",
        })
    }
}

fn invalid(field: &str, value: &dyn fmt::Display, allowed: &str) -> RuntimeError {
    RuntimeError::Telemetry(format!("`tracing.{field}` is {value}; allowed: {allowed}"))
}
