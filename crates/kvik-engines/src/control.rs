//! The socket at which a controller is asked by its operator: in the state folder, which only its user can enter.

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
use crate::config::EnginesConfig;
use crate::controller::{Controller, ControllerOptions};
use crate::error::Result;

/// Time for answers that are under way when the controller ends.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

#[derive(Debug, Deserialize)]
struct Stop {
    #[serde(default)]
    leave_running: bool,
}

/// Starts a controller and its socket: the gateway serves, the engines that an earlier controller has left are taken over,
/// and the others that are to be awake start. [`Controller::run`] waits for the end.
///
/// # Errors
/// If another controller has the state folder, an address is taken or a ledger cannot be used. No engine was started
/// then; those of an earlier controller go on.
pub async fn start_controller(options: ControllerOptions, config: EnginesConfig) -> Result<Controller> {
    let (controller, listener) = Controller::start(options, config).await?;
    controller.supervisor().shutdown.spawn(serve(listener, controller.clone()));
    Ok(controller)
}

/// Answers until the controller has ended.
async fn serve(listener: UnixListener, controller: Controller) {
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
        // It accepts until it is asked to end, and then gives the answers that are due.
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
