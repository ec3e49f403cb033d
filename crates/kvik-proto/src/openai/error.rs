//! Errors in the shape that OpenAI's clients expect.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde::{Deserialize, Serialize};

/// The body of every answer that is not a success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What is wrong.
    pub error: ErrorDetail,
}

/// What is wrong with a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorDetail {
    /// For people: names the field, the value and what is allowed.
    pub message: String,
    /// For machines: the kind of error.
    #[serde(rename = "type")]
    pub kind: String,
    /// The field, if one is at fault.
    pub param: Option<String>,
    /// For machines: which error of its kind.
    pub code: Option<String>,
}

impl ErrorBody {
    /// A request that cannot be honored as it is: 400.
    pub fn invalid_request(message: impl Into<String>, param: Option<&str>) -> Self {
        Self::new("invalid_request_error", message, param, None)
    }

    /// A request whose `param` is longer than the model's context: 400.
    pub fn context_length(message: impl Into<String>, param: &str) -> Self {
        Self::new("invalid_request_error", message, Some(param), Some("context_length_exceeded"))
    }

    /// A missing or wrong key: 401.
    pub fn authentication(message: impl Into<String>) -> Self {
        Self::new("invalid_request_error", message, None, Some("invalid_api_key"))
    }

    /// A model that is not served here: 404.
    pub fn unknown_model(model: &str) -> Self {
        let message = format!("the model `{model}` does not exist here");
        Self::new("invalid_request_error", message, Some("model"), Some("model_not_found"))
    }

    /// Too many requests: 429.
    pub fn rate_limit(message: impl Into<String>) -> Self {
        Self::new("rate_limit_error", message, None, Some("rate_limit_exceeded"))
    }

    /// A failure that the request did not cause: 5xx.
    pub fn server(message: impl Into<String>) -> Self {
        Self::new("server_error", message, None, None)
    }

    /// The whole answer; `retry_after_s` tells when trying again is worthwhile.
    pub fn response(&self, status: StatusCode, retry_after_s: Option<u64>) -> Response<Bytes> {
        // Strings always can be written.
        let body = serde_json::to_vec(self).unwrap_or_default();
        let mut response = Response::new(Bytes::from(body));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = retry_after_s {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }

    fn new(kind: &str, message: impl Into<String>, param: Option<&str>, code: Option<&str>) -> Self {
        Self {
            error: ErrorDetail {
                message: message.into(),
                kind: kind.to_owned(),
                param: param.map(str::to_owned),
                code: code.map(str::to_owned),
            },
        }
    }
}
