use proptest::prelude::*;

use super::*;
use crate::simd::Isa;

fn frequencies_of(symbols: &[u8]) -> Frequencies {
    let mut weights = [0; N_SYMBOLS];
    for symbol in symbols {
        weights[usize::from(*symbol)] += 1;
    }
    Frequencies::of_weights(&weights)
}

/// Decodes in parts of `part_units`, which is even.
fn decoded(
    isa: Isa,
    stream: &[u8],
    frequencies: &[Frequencies],
    classes: &[u8],
    part_units: usize,
) -> crate::Result<Vec<u8>> {
    let tables: Vec<_> = frequencies.iter().map(Frequencies::slots).collect();
    let mut decoder = Decoder::new(isa, stream)?;
    let mut symbols = vec![[0; LANES]; classes.len()];
    for (symbols, classes) in symbols.chunks_mut(part_units).zip(classes.chunks(part_units)) {
        decoder.decode(&tables, classes, symbols)?;
    }
    decoder.finish()?;
    Ok(symbols.into_flattened())
}

fn encoded(symbols: &[u8], frequencies: &[Frequencies], classes: &[u8]) -> Vec<u8> {
    let ranges: Vec<_> = frequencies.iter().map(Frequencies::ranges).collect();
    let mut stream = Vec::new();
    encode(symbols, classes, &ranges, &mut stream);
    stream
}

proptest! {
    #[test]
    fn symbols_come_back_on_every_instruction_set(
        n_units in 0..70_usize,
        seed in any::<u64>(),
        spread in 1..256_u64,
        part_units in 1..20_usize,
    ) {
        let mut state = seed;
        let symbols: Vec<u8> = (0..n_units * LANES)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 40) % spread * ((state >> 33) % 3) / 2) as u8
            })
            .collect();
        let frequencies = [frequencies_of(&symbols), Frequencies::of_weights(&[1; N_SYMBOLS])];
        let classes: Vec<u8> = (0..n_units).map(|unit_idx| (unit_idx % 3 / 2) as u8).collect();
        let stream = encoded(&symbols, &frequencies, &classes);
        for isa in Isa::available() {
            prop_assert_eq!(&decoded(isa, &stream, &frequencies, &classes, 2 * part_units).unwrap(), &symbols);
        }
    }

    #[test]
    fn any_bytes_are_decoded_alike_or_refused(
        mut stream in proptest::collection::vec(any::<u8>(), STREAM_HEAD_BYTES..600),
        n_units in 0..40_usize,
        n_even in 0..100_u32,
    ) {
        let n_words = ((stream.len() - STREAM_HEAD_BYTES) / 2) as u32;
        let n_even = n_even.min(n_words);
        stream[..4].copy_from_slice(&n_even.to_le_bytes());
        stream[4..8].copy_from_slice(&(n_words - n_even).to_le_bytes());
        let frequencies = [frequencies_of(b"some text that is no stream")];
        let results: Vec<_> = Isa::available()
            .into_iter()
            .map(|isa| decoded(isa, &stream, &frequencies, &vec![0; n_units], 8))
            .collect();
        prop_assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    }

    #[test]
    fn frequencies_sum_up_and_are_read_back(weights in proptest::collection::vec(0..100_000_u64, N_SYMBOLS)) {
        let weights: [u64; N_SYMBOLS] = weights.try_into().unwrap();
        let frequencies = Frequencies::of_weights(&weights.map(|weight| weight.saturating_sub(60_000).pow(2)));
        let mut bytes = Vec::new();
        frequencies.write(&mut bytes);
        prop_assert_eq!(Frequencies::read(&mut bytes.as_slice()).unwrap(), frequencies);
    }
}

#[test]
fn a_likely_symbol_costs_little() {
    let symbols: Vec<u8> = (0..LANES * 1000).map(|idx| u8::from(idx % 64 == 0)).collect();
    let frequencies = [frequencies_of(&symbols)];
    let stream = encoded(&symbols, &frequencies, &vec![0; 1000]);
    // 0.116 bits a symbol.
    assert!(stream.len() < STREAM_HEAD_BYTES + 280, "{}", stream.len());
}

#[test]
fn a_stream_that_was_changed_does_not_end_as_it_should() {
    let symbols: Vec<u8> = (0..LANES * 64).map(|idx| (idx * idx % 23) as u8).collect();
    let frequencies = [frequencies_of(&symbols)];
    let classes = vec![0; 64];
    let stream = encoded(&symbols, &frequencies, &classes);
    let decode = |stream: &[u8]| decoded(Isa::detect(), stream, &frequencies, &classes, 64);
    assert_eq!(decode(&stream).unwrap(), symbols);
    assert!(decode(&stream[..stream.len() - 2]).is_err());
    assert!(decode(&stream[..40]).is_err());
    for byte_idx in [8, 100, STREAM_HEAD_BYTES + 3, stream.len() - 5] {
        let mut changed = stream.clone();
        changed[byte_idx] ^= 1;
        assert!(decode(&changed).is_err(), "byte {byte_idx}");
    }
}

#[test]
fn frequencies_that_are_none_are_refused() {
    let mut good = Vec::new();
    frequencies_of(b"aab").write(&mut good);
    assert!(Frequencies::read(&mut good.as_slice()).is_ok());
    for byte_idx in 0..good.len() {
        let mut bad = good.clone();
        bad[byte_idx] ^= 0x41;
        let is_same_sum = byte_idx == 2 || byte_idx == 5;
        assert!(is_same_sum || Frequencies::read(&mut bad.as_slice()).is_err(), "byte {byte_idx}");
    }
    assert!(Frequencies::read(&mut &good[..good.len() - 1]).is_err());
    assert!(Frequencies::read(&mut [].as_slice()).is_err());
}
