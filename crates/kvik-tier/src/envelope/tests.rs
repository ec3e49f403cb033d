use proptest::prelude::*;

use super::*;

const KEY: ChunkKey =
    ChunkKey { namespace: NamespaceId(BlockHash([0x11; 16])), chunk: BlockHash([0x22; 16]), rank: 0x0304 };

const DIGEST: TokenDigest = TokenDigest([0x33; 32]);

fn sealed(parts: &[&[u8]], section_bytes: usize) -> Vec<u8> {
    let mut envelope = [0xff; ENVELOPE_BYTES];
    seal(KEY, DIGEST, parts, section_bytes, &mut envelope);
    envelope.to_vec()
}

#[test]
fn the_bytes_of_an_envelope_are_pinned() {
    let envelope = sealed(&[b"1234567", b"89"], 9);
    let mut expected = vec![0; ENVELOPE_BYTES];
    expected[..8].copy_from_slice(b"KVIKCHNK");
    expected[8] = 2;
    expected[12..14].copy_from_slice(&[0x04, 0x03]);
    expected[14] = 1;
    expected[16..32].fill(0x11);
    expected[32..48].fill(0x22);
    expected[48] = 9;
    expected[56] = 9;
    expected[64..96].fill(0x33);
    // The published check value of CRC-64/NVME is that of "123456789".
    expected[96..104].copy_from_slice(&0xae8b_1486_0a79_9888_u64.to_le_bytes());
    assert_eq!(envelope[..OWN_CHECKSUM], expected[..OWN_CHECKSUM]);
    let own_checksum = u64::from_le_bytes(envelope[OWN_CHECKSUM..].try_into().unwrap());
    assert_eq!(own_checksum, bitwise_crc64_nvme(&expected[..OWN_CHECKSUM]));
}

#[test]
fn every_flipped_bit_of_an_envelope_is_found() {
    let mut envelope = sealed(&[&[7; 5000]], 1000);
    Envelope::decode(&envelope).unwrap();
    for bit in 0..8 * ENVELOPE_BYTES {
        envelope[bit / 8] ^= 1 << (bit % 8);
        assert!(Envelope::decode(&envelope).is_err(), "bit {bit}");
        envelope[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn every_flipped_bit_of_a_chunk_is_found() {
    let mut chunk: Vec<u8> = (0..300).map(|byte| byte as u8).collect();
    let bytes = sealed(&[&chunk], 100);
    let envelope = Envelope::decode(&bytes).unwrap();
    envelope.prove(0, &chunk).unwrap();
    for bit in 0..8 * chunk.len() {
        chunk[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(envelope.prove(0, &chunk), Err("section checksum"), "bit {bit}");
        chunk[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn sections_that_changed_places_are_found() {
    let chunk = [[1; 64], [2; 64]].concat();
    let bytes = sealed(&[&chunk], 64);
    let envelope = Envelope::decode(&bytes).unwrap();
    assert_eq!(envelope.prove(0, &chunk[64..]), Err("section checksum"));
    assert_eq!(envelope.prove(64, &chunk[..64]), Err("section checksum"));
    envelope.prove(64, &chunk[64..]).unwrap();
}

#[test]
fn what_is_wrong_with_an_envelope_is_named() {
    type Damage = fn(&mut [u8]);
    let cases: [(&str, Damage); 8] = [
        ("envelope magic", |bytes| bytes[0] = b'k'),
        ("envelope version", |bytes| bytes[8] = 1),
        ("envelope flags", |bytes| bytes[10] = 1),
        ("section size", |bytes| bytes[48..56].fill(0)),
        ("number of sections", |bytes| bytes[14] += 1),
        ("number of sections", |bytes| bytes[60] = 1),
        ("chunk length", |bytes| bytes[56..64].fill(0xff)),
        ("bytes behind the section checksums", |bytes| bytes[OWN_CHECKSUM - 1] = 1),
    ];
    for (expected, damage) in cases {
        let mut bytes = sealed(&[&[7; 100]], 10);
        damage(&mut bytes);
        let own_checksum = checksum_of(&bytes[..OWN_CHECKSUM]);
        bytes[OWN_CHECKSUM..].copy_from_slice(&own_checksum.to_le_bytes());
        assert_eq!(Envelope::decode(&bytes).unwrap_err(), expected);
    }
    assert_eq!(Envelope::decode(&[0; 100]).unwrap_err(), "envelope length");
    let mut bytes = sealed(&[&[7; 100]], 10);
    bytes[20] ^= 1;
    assert_eq!(Envelope::decode(&bytes).unwrap_err(), "envelope checksum");
}

#[test]
fn more_sections_than_fit_are_checked_several_at_a_time() {
    let chunk = vec![3; 1200 * 16 + 5];
    let bytes = sealed(&[&chunk], 16);
    let envelope = Envelope::decode(&bytes).unwrap();
    assert_eq!((envelope.section_bytes(), envelope.n_sections()), (48, 401));
    assert_eq!(envelope.widen(16, 32), Some((0, 48)));
    envelope.prove(0, &chunk).unwrap();
    envelope.prove(400 * 48, &chunk[400 * 48..]).unwrap();
}

#[test]
fn an_empty_chunk_has_no_sections() {
    let bytes = sealed(&[], 0);
    let envelope = Envelope::decode(&bytes).unwrap();
    assert_eq!((envelope.chunk_bytes(), envelope.n_sections()), (0, 0));
    envelope.prove(0, &[]).unwrap();
    assert_eq!(envelope.prove(0, &[1]), Err("length"));
}

proptest! {
    #[test]
    fn an_envelope_comes_back_as_it_was_written(
        namespace: [u8; 16],
        chunk_hash: [u8; 16],
        rank: u16,
        digest: [u8; 32],
        chunk in proptest::collection::vec(any::<u8>(), 0..3000),
        cuts in proptest::collection::vec(0_usize..3000, 0..4),
        section_bytes in 0_usize..3500,
    ) {
        let key = ChunkKey { namespace: NamespaceId(BlockHash(namespace)), chunk: BlockHash(chunk_hash), rank };
        let digest = TokenDigest(digest);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(chunk.len())).collect();
        cuts.sort_unstable();
        let ends = cuts.iter().copied().chain([chunk.len()]);
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let parts: Vec<&[u8]> = starts.zip(ends).map(|(start, end)| &chunk[start..end]).collect();

        let mut bytes = [0xff; ENVELOPE_BYTES];
        seal(key, digest, &parts, section_bytes, &mut bytes);
        let envelope = Envelope::decode(&bytes).unwrap();
        prop_assert_eq!(envelope.key(), key);
        prop_assert_eq!(envelope.digest(), digest);
        prop_assert_eq!(envelope.chunk_bytes(), chunk.len() as u64);
        prop_assert!(u64::from(envelope.n_sections()) <= MAX_SECTIONS);
        if section_bytes > 0 && section_bytes <= chunk.len() {
            prop_assert_eq!(envelope.section_bytes() % section_bytes as u64, 0);
        }
        envelope.prove(0, &chunk).unwrap();
        for (section_idx, section) in chunk.chunks(envelope.section_bytes() as usize).enumerate() {
            envelope.prove(section_idx as u64 * envelope.section_bytes(), section).unwrap();
        }
    }

    #[test]
    fn no_input_makes_the_decoder_panic(
        start in proptest::collection::vec(any::<u8>(), SECTION_TABLE),
        offset: u64,
        end: u64,
    ) {
        let mut bytes = vec![0; ENVELOPE_BYTES];
        bytes[..SECTION_TABLE].copy_from_slice(&start);
        bytes[..12].copy_from_slice(b"KVIKCHNK\x02\0\0\0");
        let own_checksum = checksum_of(&bytes[..OWN_CHECKSUM]);
        bytes[OWN_CHECKSUM..].copy_from_slice(&own_checksum.to_le_bytes());
        if let Ok(envelope) = Envelope::decode(&bytes) {
            prop_assert!(u64::from(envelope.n_sections()) <= MAX_SECTIONS);
            let _ = envelope.widen(offset, end);
            let _ = envelope.prove(offset, &[0; 64]);
        }
    }
}

/// The checksum by its definition.
fn bitwise_crc64_nvme(bytes: &[u8]) -> u64 {
    let mut remainder = u64::MAX;
    for byte in bytes {
        remainder ^= u64::from(*byte);
        for _ in 0..8 {
            let is_odd = remainder & 1 == 1;
            remainder >>= 1;
            if is_odd {
                remainder ^= 0x9a6c_9329_ac4b_c9b5;
            }
        }
    }
    !remainder
}
