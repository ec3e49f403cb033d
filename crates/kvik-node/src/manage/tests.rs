use std::collections::BTreeMap;

use kvik_proto::cache::TierReport;
use proptest::prelude::*;

use super::*;

fn tiers() -> impl Strategy<Value = TierName> {
    "[a-z0-9-]{1,32}".prop_map(|name| TierName::try_new(&name).unwrap())
}

fn requests() -> impl Strategy<Value = ManageRequest> {
    let chunk =
        any::<([u8; 16], [u8; 32])>().prop_map(|(name, digest)| (BlockHash(name), TokenDigest(digest)));
    let some_tiers = prop::option::of(prop::collection::vec(tiers(), 0..=MAX_TIERS));
    prop_oneof![
        prop::collection::vec(chunk, 0..20).prop_map(ManageRequest::Chunks),
        any::<(u64, bool)>().prop_map(|(n_tokens, is_local)| ManageRequest::Lookup { n_tokens, is_local }),
        (any::<u64>(), prop::option::of(tiers()))
            .prop_map(|(n_tokens, tier)| ManageRequest::Prefetch { n_tokens, tier }),
        any::<u64>().prop_map(|prefetch| ManageRequest::IsLoading { prefetch }),
        any::<u64>().prop_map(|prefetch| ManageRequest::Cancel { prefetch }),
        any::<u64>().prop_map(|n_tokens| ManageRequest::Pin { n_tokens }),
        any::<(u64, u64)>().prop_map(|(n_tokens, time_ms)| ManageRequest::PinFor { n_tokens, time_ms }),
        any::<u64>().prop_map(|n_tokens| ManageRequest::Unpin { n_tokens }),
        (any::<(u64, bool)>(), tiers(), tiers()).prop_map(|((n_tokens, keeps_source), from, to)| {
            ManageRequest::Relocate { n_tokens, from, to, keeps_source }
        }),
        (any::<Option<u64>>(), some_tiers)
            .prop_map(|(n_tokens, tiers)| ManageRequest::Clear { n_tokens, tiers }),
        Just(ManageRequest::Stats),
        (any::<u64>(), tiers()).prop_map(|(n_tokens, tier)| ManageRequest::Read { n_tokens, tier }),
        (any::<u64>(), tiers()).prop_map(|(n_tokens, tier)| ManageRequest::Write { n_tokens, tier }),
    ]
}

fn stats() -> impl Strategy<Value = CacheStats> {
    let counts = prop::collection::btree_map("[a-z_]{1,20}", any::<u64>(), 0..10);
    let tier =
        ("[a-z]{1,8}", any::<Option<String>>(), any::<Option<u64>>()).prop_map(|(tier, reason, chunks)| {
            TierReport {
                tier,
                kind: "nvme".to_owned(),
                state: "up".to_owned(),
                reason,
                chunks,
                used_bytes: None,
                capacity_bytes: None,
                details: BTreeMap::new(),
                operations: Vec::new(),
            }
        });
    (any::<usize>(), counts, prop::collection::vec(tier, 0..4)).prop_map(|(chunk_tokens, counts, tiers)| {
        CacheStats { chunk_tokens, counts, tiers, store_id: "id".to_owned() }
    })
}

fn answers() -> impl Strategy<Value = ManageAnswer> {
    let counts = || prop::collection::vec((tiers(), any::<usize>()), 0..=MAX_TIERS);
    prop_oneof![
        Just(ManageAnswer::Done),
        (any::<(usize, usize)>(), counts(), prop::option::of(0..5_u64)).prop_map(
            |((n_tokens, n_chunks), tokens_by_tier, kind)| {
                let slowest_tier = kind.and_then(tier_of);
                ManageAnswer::Found(Lookup { n_tokens, n_chunks, tokens_by_tier, slowest_tier })
            }
        ),
        any::<(u64, bool)>().prop_map(|(number, is_loading)| ManageAnswer::Prefetch { number, is_loading }),
        any::<bool>().prop_map(ManageAnswer::Is),
        any::<u64>().prop_map(ManageAnswer::Count),
        counts().prop_map(ManageAnswer::Cleared),
        stats().prop_map(|stats| ManageAnswer::Stats(Box::new(stats))),
        "[a-z ]{0,40}".prop_map(|reason| ManageAnswer::Refused { reason }),
        Just(ManageAnswer::Moving),
        any::<(u64, u64)>().prop_map(|(n_stored, n_present)| ManageAnswer::Written { n_stored, n_present }),
    ]
}

proptest! {
    #[test]
    fn requests_are_read_as_they_were_written_and_what_is_cut_or_longer_is_refused(
        request in requests(),
        place in any::<prop::sample::Index>(),
    ) {
        let frame = request.encode();
        prop_assert_eq!(ManageRequest::decode(&frame).unwrap(), request.clone());
        prop_assert!(ManageRequest::decode(&[&frame[..], &[0]].concat()).is_err());
        let cut = &frame[..place.index(frame.len())];
        // Chunks that are cut between two of them are fewer chunks; the socket keeps frames whole.
        let is_refused = ManageRequest::decode(cut).is_err();
        prop_assert!(is_refused || matches!(request, ManageRequest::Chunks(_)));
    }

    #[test]
    fn answers_are_read_as_they_were_written(answer in answers()) {
        prop_assert_eq!(ManageAnswer::decode(&answer.encode()).unwrap(), answer);
    }

    #[test]
    fn any_bytes_are_a_frame_or_refused(code in 0..12_u8, bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let frame = [&MAGIC[..], &[code], &bytes].concat();
        for frame in [&bytes, &frame] {
            if let Ok(request) = ManageRequest::decode(frame) {
                prop_assert_eq!(&request.encode(), frame);
            }
            if let Ok(answer) = ManageAnswer::decode(frame) {
                prop_assert_eq!(ManageAnswer::decode(&answer.encode()).unwrap(), answer);
            }
        }
    }
}

#[test]
fn a_frame_has_no_more_chunks_than_there_is_room_for() {
    let chunks = |n_chunks| ManageRequest::Chunks(vec![(BlockHash([1; 16]), TokenDigest([2; 32])); n_chunks]);
    assert!(ManageRequest::decode(&chunks(MAX_FRAME_CHUNKS).encode()).is_ok());
    let error = ManageRequest::decode(&chunks(MAX_FRAME_CHUNKS + 1).encode()).unwrap_err();
    assert!(error.to_string().contains("`chunks` is 513"), "{error}");
}

#[test]
fn a_tier_has_a_name_of_a_bounded_length_and_few_characters() {
    let frame_with = |name: &[u8]| {
        let mut frame = ManageRequest::Prefetch { n_tokens: 1, tier: None }.encode();
        frame.pop();
        frame.push(name.len() as u8);
        frame.extend(name);
        frame
    };
    for name in [&b"a"[..], &[b'x'; 32]] {
        assert!(ManageRequest::decode(&frame_with(name)).is_ok(), "{name:?}");
    }
    for name in [&[b'x'; 33][..], b"Fast", b"a b", b"\xC3\xA4", b"\xFF"] {
        assert!(ManageRequest::decode(&frame_with(name)).is_err(), "{name:?}");
    }
    // Where there must be one, none is refused.
    let mut frame = MAGIC.to_vec();
    frame.push(7);
    push_number(&mut frame, 1);
    frame.extend([0, 0, 0]);
    assert!(ManageRequest::decode(&frame).is_err());
}

#[test]
fn statistics_without_room_in_a_frame_are_a_refusal() {
    let counts = (0..4000).map(|number| (format!("count number {number}"), u64::MAX)).collect();
    let stats = CacheStats { chunk_tokens: 1, counts, tiers: Vec::new(), store_id: String::new() };
    let answer = ManageAnswer::decode(&ManageAnswer::Stats(Box::new(stats)).encode()).unwrap();
    assert!(matches!(answer, ManageAnswer::Refused { .. }), "{answer:?}");
}
