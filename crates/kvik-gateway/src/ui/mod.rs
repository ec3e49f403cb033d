//! The web page at `/ui`, and what it shows.
//!
//! | call | answer | access |
//! |---|---|---|
//! | `GET /ui/`, `/ui/FILE` | the page: static files of this binary | all |
//! | `GET /ui/events` | server-sent events: the fleet and the last hour at once, then the fleet every second | as `/v1/score` |
//! | `/ui/workers/{id}/...` | a call to a worker, see [`calls`] | admin scope, here and at the worker |
//!
//! Everything else that the page does goes through the gateway's public API.
//!
//! `collector` is the task that asks the workers for their figures: once a second while a page is open, every ten seconds
//! otherwise, for the last hour. It reads `/metrics` (`exposition`, `figures`), so that the page and Prometheus
//! never differ. `board` is where pages find what it last read, and `series` the last hour. Requests of clients do not
//! notice any of this: nothing here takes a lock that they take for longer than one worker needs.

mod assets;
pub(crate) mod board;
mod calls;
pub(crate) mod collector;
mod events;
mod exposition;
mod figures;
mod fleet_report;
pub(crate) mod same_origin;
mod series;

use std::sync::Arc;

use axum::Router;
use axum::routing::get;

use crate::state::Shared;

/// The routes of the page.
pub(crate) fn router(shared: &Arc<Shared>) -> Router<Arc<Shared>> {
    Router::new()
        .route("/", get(assets::root))
        .route("/ui", get(assets::folder))
        .route("/ui/", get(assets::index))
        .route("/ui/{file}", get(assets::file))
        .route("/ui/events", get(events::events))
        .merge(shared.trust.admins_only(same_origin::only(calls::router())))
}
