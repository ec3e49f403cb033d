//! Questions to a running controller, over its socket.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;

use crate::error::{EnginesError, Result};
use crate::state_folder::socket_path;
use crate::status::ControllerStatus;

/// Longest answer that is read, in bytes.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// A client of the controller with one state folder.
#[derive(Debug, Clone)]
pub struct ControllerClient {
    state: PathBuf,
}

impl ControllerClient {
    /// A client of the controller that keeps its state in `state`.
    pub fn new(state: &Path) -> Self {
        Self { state: state.to_owned() }
    }

    /// What the controller and its engines do.
    ///
    /// # Errors
    /// If no controller runs there.
    pub async fn status(&self) -> Result<ControllerStatus> {
        let value = self.call(Method::GET, "/status").await?;
        serde_json::from_value(value).map_err(|error| EnginesError::Answer(error.to_string()))
    }

    /// Puts the engine of a model to sleep, and waits until it sleeps.
    ///
    /// # Errors
    /// If no controller runs there, or the engine does not sleep.
    pub async fn sleep(&self, model: &str) -> Result<()> {
        self.call(Method::POST, &format!("/sleep/{}", escaped(model))).await.map(|_| ())
    }

    /// Wakes the engine of a model, and waits until it serves.
    ///
    /// # Errors
    /// If no controller runs there, or the engine does not wake.
    pub async fn wake(&self, model: &str) -> Result<()> {
        self.call(Method::POST, &format!("/wake/{}", escaped(model))).await.map(|_| ())
    }

    /// Lets the controller read its file again; says what has changed.
    ///
    /// # Errors
    /// If no controller runs there, or the file cannot be used: then nothing has changed.
    pub async fn reload(&self) -> Result<Vec<String>> {
        let value = self.call(Method::POST, "/reload").await?;
        let changes = value.get("changes").cloned().unwrap_or_default();
        serde_json::from_value(changes).map_err(|error| EnginesError::Answer(error.to_string()))
    }

    /// Ends the controller, and its engines unless they are to go on; waits until it has ended.
    ///
    /// # Errors
    /// If no controller runs there.
    pub async fn stop(&self, leaves_running: bool) -> Result<()> {
        let path = if leaves_running { "/stop?leave_running=true" } else { "/stop" };
        self.call(Method::POST, path).await.map(|_| ())
    }

    async fn call(&self, method: Method, path: &str) -> Result<Value> {
        let socket = socket_path(&self.state);
        let not_running = || EnginesError::NotRunning { state: self.state.clone() };
        let stream = UnixStream::connect(&socket).await.map_err(|_| not_running())?;
        let broken = |error: hyper::Error| EnginesError::Answer(error.to_string());
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(http::header::HOST, "controller")
            .body(Full::<Bytes>::default())
            .map_err(|error| EnginesError::Answer(error.to_string()))?;
        let asking = async {
            let response = sender.send_request(request).await.map_err(broken)?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
            let body = body.map_err(|error| EnginesError::Answer(error.to_string()))?.to_bytes();
            let value: Value =
                serde_json::from_slice(&body).map_err(|error| EnginesError::Answer(error.to_string()))?;
            if status.is_success() {
                return Ok(value);
            }
            let message = value["error"]["message"].as_str().unwrap_or("the controller refused").to_owned();
            Err(EnginesError::Refused { message })
        };
        // A connection that ends early is an error of the question.
        let driving = async {
            let _ = connection.await;
            std::future::pending::<Result<Value>>().await
        };
        tokio::select! {
            answered = asking => answered,
            answered = driving => answered,
        }
    }
}

/// A name as a part of a path.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'/' | b'~') {
            escaped.push(char::from(byte));
        } else {
            // A string takes all that is written to it.
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_escaped_as_a_path() {
        assert_eq!(escaped("org/model-1.5_x"), "org/model-1.5_x");
        assert_eq!(escaped("a b?c\u{e4}"), "a%20b%3Fc%C3%A4");
    }

    #[tokio::test]
    async fn without_a_controller_the_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = ControllerClient::new(folder.path()).status().await.unwrap_err();
        assert!(matches!(error, EnginesError::NotRunning { .. }), "{error}");
        assert!(error.to_string().contains(folder.path().to_str().unwrap()), "{error}");
    }
}
