//! Starts and restarts in any order.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use crate::cluster::{Role, start_coordinator, start_gateway, start_worker};
use crate::process::{eventually, free_address, kvik};

/// The addresses of one coordinator, one worker and one gateway.
struct Addresses([String; 3]);

impl Addresses {
    fn start(&self, role: &str) -> Role {
        let Self([coordinator, worker, gateway]) = self;
        match role {
            "coordinator" => start_coordinator(coordinator, &[]),
            "worker" => start_worker(worker, "worker-1", &[coordinator]),
            _ => start_gateway(gateway, &[coordinator], &[]),
        }
    }
}

#[test]
fn the_service_comes_up_in_any_order_of_its_roles() {
    let orders = [
        ["coordinator", "worker", "gateway"],
        ["coordinator", "gateway", "worker"],
        ["worker", "coordinator", "gateway"],
        ["worker", "gateway", "coordinator"],
        ["gateway", "coordinator", "worker"],
        ["gateway", "worker", "coordinator"],
    ];
    for order in orders {
        let addresses = Addresses([free_address(), free_address(), free_address()]);
        let roles = order.map(|role| addresses.start(role));
        let gateway = &roles[order.iter().position(|role| *role == "gateway").unwrap()];
        gateway.wait_for_backends(1);
        assert_eq!(gateway.served_by("sequence"), "worker-1", "{order:?}");
    }
}

#[test]
fn every_role_can_be_killed_and_started_again() {
    let addresses = Addresses([free_address(), free_address(), free_address()]);
    let names = ["coordinator", "worker", "gateway"];
    let mut roles = names.map(|role| addresses.start(role));
    roles[2].wait_for_backends(1);
    for index in [1, 0, 2, 1, 0] {
        roles[index].process.kill();
        roles[index] = addresses.start(names[index]);
        // A worker's death may be noticed only when it is back.
        eventually("the service serves again", || {
            let mut answer = roles[2].complete("sequence", 4, false).ok()?;
            let body = answer.text().unwrap();
            assert!(matches!(answer.status, 200 | 502 | 503), "{}: {body}", names[index]);
            (answer.status == 200).then_some(())
        });
    }
}

#[test]
fn a_service_whose_log_has_no_reader_any_more_ends_when_it_is_asked_to() {
    let arguments = ["coordinator", "--listen", "127.0.0.1:0", "--log-format", "json"];
    let mut child = kvik().args(arguments).stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("coordinator listens") {
        line.clear();
        assert_ne!(log.read_line(&mut line).unwrap(), 0, "it ended");
    }
    drop(log);
    let status = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
    let status = eventually("the service ends", || child.try_wait().unwrap());
    assert!(status.success(), "{status}");
}
