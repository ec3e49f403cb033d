//! Runs the roles as processes of their own on loopback, and takes them away under load.

#![expect(clippy::unwrap_used, reason = "the helpers are tests too: what they cannot do ends the test")]

mod clients;
mod cluster;
mod compress_kills;
mod config;
mod coordinators;
mod engines;
mod engines_native;
mod epp;
mod etcd;
mod fault_proxy;
mod held;
mod http;
mod index;
mod memory;
mod moving;
mod moving_case;
mod moving_matrix;
mod process;
mod rebalancing;
mod restarts;
mod roles;
mod secrets;
mod slow_clients;
mod store;
mod store_cluster;
mod store_daemon;
mod store_segments;
mod streams;
mod tls;
mod tracing;
mod trust;
mod up;
mod workers;
