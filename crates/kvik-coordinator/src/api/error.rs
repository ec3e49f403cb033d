//! Errors as answers.

use axum::Json;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode, Uri, header};
use kvik_proto::openai::{ErrorBody, ErrorDetail};
use kvik_runtime::http::RequestBodyError;

use crate::leader::CommandError;
use crate::membership::MembershipError;

/// Why a call was not answered as asked.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    body: ErrorBody,
}

impl ApiError {
    /// A value that is not allowed: 400.
    pub(super) fn invalid(field: &str, message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, body: ErrorBody::invalid_request(message, Some(field)) }
    }

    /// A request that cannot be read.
    pub(super) fn rejected(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, body: ErrorBody::invalid_request(message, None) }
    }

    /// A body that cannot be read: 408 if it is slow, 503 if too many others are arriving.
    pub(super) fn unread(rejection: &BytesRejection) -> Self {
        match RequestBodyError::find(rejection) {
            Some(error @ RequestBodyError::Slow) => {
                Self::rejected(StatusCode::REQUEST_TIMEOUT, error.to_string())
            }
            Some(error @ RequestBodyError::NoRoom) => Self::unavailable(error.to_string(), "bodies_full"),
            _ => Self::rejected(rejection.status(), rejection.body_text()),
        }
    }

    /// Something that cannot be done now: 503. Clients may try again.
    pub(super) fn unavailable(message: impl Into<String>, code: &str) -> Self {
        let mut body = ErrorBody::server(message);
        body.error.code = Some(code.to_owned());
        Self { status: StatusCode::SERVICE_UNAVAILABLE, body }
    }

    /// A write that no leader took: 503.
    pub(super) fn no_leader() -> Self {
        Self::unavailable("no coordinator leads now; a new leader is being elected", "not_leader")
    }

    /// A command of member `id` that was not done.
    pub(super) fn of_command(id: &str, error: CommandError) -> Self {
        let refused = |status, code: &str, message| {
            let error = ErrorDetail {
                message,
                kind: "invalid_request_error".to_owned(),
                param: Some("id".to_owned()),
                code: Some(code.to_owned()),
            };
            Self { status, body: ErrorBody { error } }
        };
        match error {
            CommandError::NotLeader => Self::no_leader(),
            CommandError::Refused(MembershipError::Unknown) => {
                refused(StatusCode::NOT_FOUND, "unknown_worker", format!("`{id}` is not registered"))
            }
            CommandError::Refused(MembershipError::StaleEpoch { registered }) => refused(
                StatusCode::CONFLICT,
                "stale_epoch",
                format!("`{id}` is registered with epoch {registered}; allowed: a later one"),
            ),
            CommandError::Refused(MembershipError::AddressTaken { registered }) => refused(
                StatusCode::CONFLICT,
                "address_taken",
                format!("`{id}` is registered at {registered} with this epoch; allowed: a later epoch"),
            ),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body)).into_response();
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, http::HeaderValue::from_static("1"));
        }
        response
    }
}

pub(super) async fn unknown_path(uri: Uri) -> ApiError {
    ApiError::rejected(StatusCode::NOT_FOUND, format!("{} does not exist here", uri.path()))
}

pub(super) async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::rejected(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not take {method}", uri.path()))
}
