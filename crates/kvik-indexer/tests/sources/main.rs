//! Sources against engines and API servers that the tests play, well behaved and not.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod api_server;
mod engine;
#[cfg(feature = "kubernetes-tests")]
#[path = "../../../../tests/support/etcd.rs"]
mod etcd;
mod hostile;
#[cfg(feature = "kubernetes-tests")]
#[path = "../../../../tests/support/kube_server.rs"]
mod kube_server;
mod kubernetes;
#[cfg(feature = "kubernetes-tests")]
mod kubernetes_pods;
#[cfg(feature = "kubernetes-tests")]
mod kubernetes_server;
mod peer;
#[cfg(feature = "kubernetes-tests")]
#[path = "../../../../tests/support/poll.rs"]
mod poll;
#[cfg(feature = "kubernetes-tests")]
#[path = "../../../../tests/support/port.rs"]
mod port;
mod support;
