//! Measurements: one file a subject, and the report that all of them give.

pub(crate) mod engine;
pub(crate) mod gateway;
pub(crate) mod index;
pub(crate) mod memory;
pub(crate) mod report;
pub(crate) mod routing;
pub(crate) mod store;
