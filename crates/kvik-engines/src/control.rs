//! The socket at which a controller is asked by its operator: in the state folder, which only its user can enter.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Query, State};
use axum::response::Response;
use axum::routing::{get, post};
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::UnixListener;

use crate::api::{answer, put_to_sleep, refused, wake_up};
use crate::controller::Controller;
use crate::error::{EnginesError, Result};
use crate::state_folder::socket_path;

/// Time for answers that are under way when the controller ends.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

#[derive(Debug, Deserialize)]
struct Stop {
    #[serde(default)]
    leave_running: bool,
}

/// Listens at the socket of a state folder; one that an earlier controller has left is removed.
///
/// # Errors
/// If it cannot be listened at.
pub(crate) fn listen(state: &Path) -> Result<UnixListener> {
    let path = socket_path(state);
    // The folder is locked: no other controller listens there.
    let _ = std::fs::remove_file(&path);
    UnixListener::bind(&path).map_err(EnginesError::io("listen at", path))
}

/// Answers until the controller has ended.
pub(crate) async fn serve(listener: UnixListener, controller: Controller) {
    let supervisor = Arc::clone(controller.supervisor());
    let engines = Router::new()
        .route("/sleep/{*model}", post(put_to_sleep))
        .route("/wake/{*model}", post(wake_up))
        .with_state(Arc::clone(&supervisor));
    let router = Router::new()
        .route("/status", get(status))
        .route("/reload", post(reload))
        .route("/stop", post(stop))
        .with_state(controller)
        .merge(engines)
        .fallback(async || refused(StatusCode::NOT_FOUND, "there is nothing at this path"));
    let (ending, end) = (supervisor.shutdown.clone(), supervisor.shutdown.clone());
    let serving =
        axum::serve(listener, router).with_graceful_shutdown(async move { ending.stopping().await });
    let overdue = async {
        end.stopping().await;
        tokio::time::sleep(LAST_ANSWERS).await;
    };
    tokio::select! {
        // It accepts until it is told to end, and then gives the answers that are due.
        _ = std::future::IntoFuture::into_future(serving) => {}
        () = overdue => {}
    }
}

async fn status(State(controller): State<Controller>) -> Response {
    match serde_json::to_value(controller.status()) {
        Ok(value) => answer(StatusCode::OK, &value),
        Err(error) => refused(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

async fn reload(State(controller): State<Controller>) -> Response {
    match controller.reload() {
        Ok(changes) => answer(StatusCode::OK, &json!({ "changes": changes })),
        Err(error) => refused(StatusCode::BAD_REQUEST, &error.to_string()),
    }
}

/// Answers when all engines have ended or were left.
async fn stop(State(controller): State<Controller>, Query(stop): Query<Stop>) -> Response {
    controller.stop(stop.leave_running).await;
    answer(StatusCode::OK, &Value::Object(serde_json::Map::new()))
}
