use proptest::prelude::*;

use super::*;

fn extent() -> impl Strategy<Value = Extent> {
    (0_u32..=5, 0_u32..1 << 20).prop_map(|(log2_pages, index)| {
        let n_pages = 1 << log2_pages;
        Extent { first_page: PageId(index * n_pages), n_pages }
    })
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Map), Just(Kind::Unmap)]
}

fn greeting() -> impl Strategy<Value = Greeting> {
    let geometry = (1_u32..128, 1_u64..16, 1_u32..1 << 12).prop_map(|(n_buffers, n_units, n_pages)| {
        Geometry::try_new(n_buffers, n_units << 21, n_pages).unwrap()
    });
    (any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>(), geometry).prop_map(
        |(generation, resumed_instance, rank, world, geometry)| Greeting {
            generation,
            resumed_instance,
            rank,
            world,
            geometry,
        },
    )
}

fn request() -> impl Strategy<Value = Request> {
    let body = prop_oneof![
        greeting().prop_map(Body::Hello),
        (kind(), any::<u32>(), prop::collection::vec(extent(), 1..40))
            .prop_map(|(kind, part, extents)| Body::Prepare { kind, part, extents }),
        kind().prop_map(Body::Commit),
        kind().prop_map(Body::Abort),
        Just(Body::Status),
    ];
    (1..=u64::MAX, any::<u32>(), body).prop_map(|(transaction, group, body)| Request {
        transaction: if matches!(body, Body::Hello(_)) { 0 } else { transaction },
        group,
        body,
    })
}

fn reply() -> impl Strategy<Value = Reply> {
    let numbers = (1_u8..=8, 1_u8..=8, any::<u64>(), any::<u32>(), any::<u64>());
    (numbers, prop::collection::vec(extent(), 0..40), any::<bool>(), "[a-z \u{e9}\u{4e16}]{0,80}").prop_map(
        |((op, status, transaction, part, instance), extents, whole, detail)| Reply {
            op: Op::from_code(op).unwrap(),
            transaction,
            part,
            instance,
            status: Status::from_code(status).unwrap(),
            extents,
            whole,
            detail,
        },
    )
}

fn empty_reply() -> Reply {
    Reply {
        op: Op::AbortMap,
        transaction: 1,
        part: 0,
        instance: 2,
        status: Status::Failed,
        extents: Vec::new(),
        whole: false,
        detail: String::new(),
    }
}

proptest! {
    #[test]
    fn a_request_survives_the_wire(request in request()) {
        prop_assert_eq!(Request::decode(&request.encode()).unwrap(), request);
    }

    #[test]
    fn a_reply_survives_the_wire(reply in reply()) {
        prop_assert_eq!(Reply::decode(&reply.encode()).unwrap(), reply);
    }

    #[test]
    fn a_frame_that_is_cut_or_too_long_is_refused(request in request(), reply in reply(), cut: prop::sample::Index) {
        let (mut request, mut reply) = (request.encode(), reply.encode());
        prop_assert!(Request::decode(&request[..cut.index(request.len())]).is_err());
        prop_assert!(Reply::decode(&reply[..cut.index(reply.len())]).is_err());
        request.push(0);
        reply.push(0);
        prop_assert!(Request::decode(&request).is_err());
        prop_assert!(Reply::decode(&reply).is_err());
    }

    #[test]
    fn a_flipped_bit_is_refused_or_is_another_frame(
        request in request(), reply in reply(), at: prop::sample::Index, bit in 0_u8..8,
    ) {
        let mut bytes = request.encode();
        let flipped = at.index(bytes.len());
        bytes[flipped] ^= 1 << bit;
        if let Ok(other) = Request::decode(&bytes) {
            prop_assert_ne!(&other, &request);
            prop_assert_eq!(other.encode(), bytes);
        }
        let mut bytes = reply.encode();
        let flipped = at.index(bytes.len());
        bytes[flipped] ^= 1 << bit;
        if let Ok(other) = Reply::decode(&bytes) {
            prop_assert_ne!(&other, &reply);
            prop_assert_eq!(other.encode(), bytes);
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Request::decode(&bytes).is_err());
        prop_assert!(Reply::decode(&bytes).is_err());
    }
}

#[test]
fn the_largest_reply_fits_and_a_larger_one_stands_for_the_whole_transaction() {
    let extents: Vec<Extent> =
        (0..=MAX_FRAME_EXTENTS as u32).map(|page| Extent { first_page: PageId(page), n_pages: 1 }).collect();
    let detail = "\u{e9}".repeat(MAX_DETAIL_BYTES);
    let largest = Reply { extents: extents[..MAX_FRAME_EXTENTS].to_vec(), detail, ..empty_reply() };
    assert_eq!(largest.encode().len(), MAX_FRAME_BYTES);
    assert!(!Reply::decode(&largest.encode()).unwrap().whole);
    let larger = Reply { extents, ..largest };
    assert!(Reply::decode(&larger.encode()).unwrap().whole);
}

#[test]
fn a_detail_is_cut_at_a_character() {
    let detail = format!("x{}", "\u{e9}".repeat(MAX_DETAIL_BYTES));
    let decoded = Reply::decode(&Reply { detail, ..empty_reply() }.encode()).unwrap();
    assert_eq!(decoded.detail.len(), MAX_DETAIL_BYTES - 1);
}

#[test]
fn a_frame_of_another_version_names_both() {
    let mut frame = empty_reply().encode();
    frame[4] = 9;
    let message = Reply::decode(&frame).unwrap_err().to_string();
    assert!(message.contains("version` is 9") && message.contains("allowed: 1"), "{message}");
}

#[test]
fn extents_that_no_region_has_are_refused() {
    for (first_page, n_pages) in [(0, 0), (0, 3), (0, 64), (1, 2), (u32::MAX, 1), (16, 32)] {
        let extents = vec![Extent { first_page: PageId(first_page), n_pages }];
        let body = Body::Prepare { kind: Kind::Map, part: 0, extents };
        let frame = Request { transaction: 1, group: 0, body }.encode();
        assert!(Request::decode(&frame).is_err(), "{n_pages} pages at {first_page}");
    }
}
