//! A coordinator that is away.

use crate::cluster::{Cluster, Settings, member_ids, start_coordinator};
use crate::process::eventually;

#[test]
fn routing_goes_on_without_a_coordinator_and_a_new_one_learns_the_workers() {
    // A worker that is slow to say that it is well, on a busy machine, stays a worker.
    let gateway = &["health.timeout_ms=10000"];
    let mut cluster = Cluster::start(Settings { gateway, ..Settings::default() });
    let sequences = ["worker-1", "worker-2"].map(|worker| (cluster.sequence_of(worker), worker));

    cluster.coordinator.process.kill();
    for (sequence, worker) in &sequences {
        assert_eq!(cluster.gateway.served_by(sequence), *worker);
    }

    let address = cluster.coordinator.address.clone();
    cluster.coordinator = start_coordinator(&address, &[]);
    eventually("the workers are back", || (member_ids(&address)? == ["worker-1", "worker-2"]).then_some(()));
    eventually("the gateway is connected again", || {
        (0.5 < cluster.gateway.metric("kvik_gateway_coordinator_connected", "")?).then_some(())
    });
    for (sequence, worker) in &sequences {
        assert_eq!(cluster.gateway.served_by(sequence), *worker);
    }
}
