use proptest::prelude::*;

use super::*;

fn limits() -> impl Strategy<Value = Option<u64>> {
    prop::option::of(0..u64::MAX)
}

fn requests() -> impl Strategy<Value = Request> {
    let open = (any::<u64>(), limits(), any::<u32>(), any::<u32>(), ".{0,40}", ".{0,40}").prop_map(
        |(min_bytes, max_bytes, weight, priority, ipc_name, label)| {
            let policy = Policy { min_bytes, max_bytes, weight, priority };
            RequestBody::Open { ipc_name, label, policy }
        },
    );
    let body = prop_oneof![
        open,
        (any::<u64>(), any::<u32>())
            .prop_map(|(n_bytes, timeout_ms)| RequestBody::Claim { n_bytes, timeout_ms }),
        any::<u64>().prop_map(|n_bytes| RequestBody::GiveBack { n_bytes }),
        Just(RequestBody::Stats),
        limits().prop_map(|limit_bytes| RequestBody::SetLimit { limit_bytes }),
    ];
    (any::<u32>(), body).prop_map(|(number, body)| Request { number, body })
}

fn from_server() -> impl Strategy<Value = FromServer> {
    let outcome = prop_oneof![
        Just(Outcome::Opened),
        Just(Outcome::Granted),
        Just(Outcome::Denied(Shortage::DeviceFull)),
        Just(Outcome::Denied(Shortage::GroupLimit)),
        Just(Outcome::Denied(Shortage::OverShare)),
        Just(Outcome::GivenBack),
        any::<[u64; 3]>().prop_map(|[budget_bytes, held_bytes, group_held_bytes]| {
            Outcome::Stats(DeviceStanding { budget_bytes, held_bytes, group_held_bytes })
        }),
        Just(Outcome::LimitSet),
        (any::<u8>(), ".{0,60}").prop_map(|(op, reason)| Outcome::Refused { op, reason }),
    ];
    let reply = (any::<u32>(), any::<[u64; 3]>(), outcome).prop_map(|(number, standing, outcome)| {
        let [held_bytes, claimable_bytes, limit_bytes] = standing;
        let standing = Standing { held_bytes, claimable_bytes, limit_bytes };
        FromServer::Reply(Reply { number, outcome, standing })
    });
    prop_oneof![
        4 => reply,
        1 => any::<u64>().prop_map(|n_bytes| FromServer::Notice(Notice::Reclaim { n_bytes })),
        1 => any::<u64>().prop_map(|limit_bytes| FromServer::Notice(Notice::Limit { limit_bytes })),
    ]
}

fn encode(from_server: &FromServer) -> Vec<u8> {
    match from_server {
        FromServer::Reply(reply) => reply.encode(),
        FromServer::Notice(notice) => notice.encode(),
    }
}

proptest! {
    #[test]
    fn a_request_decodes_to_what_was_encoded(request in requests()) {
        prop_assert_eq!(Request::decode(&request.encode()).unwrap(), request);
    }

    #[test]
    fn what_the_server_sends_decodes_to_what_was_encoded(sent in from_server()) {
        prop_assert_eq!(FromServer::decode(&encode(&sent)).unwrap(), sent);
    }

    #[test]
    fn a_frame_that_is_cut_or_longer_is_refused(request in requests(), sent in from_server(), extra in any::<u8>()) {
        for frame in [request.encode(), encode(&sent)] {
            for n_bytes in 0..frame.len() {
                prop_assert!(Request::decode(&frame[..n_bytes]).is_err());
                prop_assert!(FromServer::decode(&frame[..n_bytes]).is_err());
            }
            let mut longer = frame.clone();
            longer.push(extra);
            prop_assert!(Request::decode(&longer).is_err());
            prop_assert!(FromServer::decode(&longer).is_err());
        }
    }

    #[test]
    fn what_decodes_encodes_to_the_same_bytes(mut frame in requests().prop_map(|request| request.encode()), place in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let place = place.index(frame.len());
        frame[place] = byte;
        if let Ok(request) = Request::decode(&frame) {
            prop_assert_eq!(request.encode(), frame);
        }
    }
}

#[test]
fn the_bytes_of_a_claim_are_those_of_the_table() {
    let claim = Request { number: 7, body: RequestBody::Claim { n_bytes: 2 << 20, timeout_ms: 500 } };
    let bytes = b"KVMQ\x01\x00\x02\x00\x07\x00\x00\x00\x00\x00\x20\x00\x00\x00\x00\x00\xf4\x01\x00\x00";
    assert_eq!(claim.encode(), bytes);
}

#[test]
fn another_version_is_refused_with_its_number() {
    let mut frame = Request { number: 0, body: RequestBody::Stats }.encode();
    frame[4] = 9;
    assert!(Request::decode(&frame).unwrap_err().to_string().contains("`memory frame version` is 9"));
}
