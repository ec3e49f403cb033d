//! What is stored of a value beside its bytes.

use kvik_tier::{LmForm, LmKey};

/// Length of a record.
pub(super) const RECORD_BYTES: usize = 256;

/// Length of a record's beginning: everything but the key.
const FIXED_BYTES: usize = 56;

/// What the first bytes of a record are; another form of it gets other ones.
const TAG: [u8; 8] = *b"kvik-lm1";

/// A value without its bytes, and where these are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ValueRecord {
    /// The bytes of the value.
    pub(super) n_bytes: usize,
    /// What the value is to its owner.
    pub(super) form: LmForm,
    /// The name of the chunk that has the bytes. Each value that is stored gets one of its own.
    pub(super) body: BodyId,
}

/// Names the bytes of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BodyId(pub(super) [u8; 16]);

impl ValueRecord {
    /// Writes the record of the value of a key: as many bytes as fit, and there is room for [`RECORD_BYTES`].
    pub(super) fn write(&self, key: &LmKey, memory: &mut [u8]) {
        let LmForm { format, dtype, shape } = self.form;
        let [first, second, third, fourth] = shape;
        let mut record = Vec::with_capacity(RECORD_BYTES);
        record.extend(TAG);
        record.extend((self.n_bytes as u64).to_le_bytes());
        for number in [format, dtype, first, second, third, fourth] {
            record.extend(number.to_le_bytes());
        }
        record.extend(self.body.0);
        record.extend(key.as_str().as_bytes());
        record.resize(memory.len().max(record.len()), 0);
        memory.copy_from_slice(&record[..memory.len()]);
    }

    /// Reads the record of the value of a key; `None` where the bytes are not that.
    pub(super) fn read(key: &LmKey, memory: &[u8]) -> Option<Self> {
        let (tag, rest) = memory.split_first_chunk::<8>()?;
        let (n_bytes, rest) = rest.split_first_chunk::<8>()?;
        let (numbers, rest) = rest.split_first_chunk::<24>()?;
        let (body, name) = rest.split_first_chunk::<16>()?;
        let key = key.as_str().as_bytes();
        let is_of_key = name.strip_prefix(key)?.iter().all(|byte| *byte == 0);
        let (numbers, _) = numbers.as_chunks::<4>();
        let [format, dtype, shape @ ..] =
            std::array::from_fn::<i32, 6, _>(|at| i32::from_le_bytes(numbers[at]));
        let n_bytes = usize::try_from(u64::from_le_bytes(*n_bytes)).ok()?;
        let record = Self { n_bytes, form: LmForm { format, dtype, shape }, body: BodyId(*body) };
        (*tag == TAG && is_of_key && n_bytes > 0).then_some(record)
    }
}

const _: () = assert!(FIXED_BYTES + kvik_tier::LM_KEY_BYTES <= RECORD_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_for_its_key_alone() {
        let form = LmForm { format: 1, dtype: -3, shape: [2, 16, 256, i32::MAX] };
        let record = ValueRecord { n_bytes: 7 << 30, form, body: BodyId([9; 16]) };
        for text in ["a@1@0@ff@bfloat16".to_owned(), "k".repeat(150)] {
            let key = LmKey::new(&text).unwrap();
            for n_bytes in [RECORD_BYTES, RECORD_BYTES + 100] {
                let mut memory = vec![0xee; n_bytes];
                record.write(&key, &mut memory);
                assert_eq!(ValueRecord::read(&key, &memory), Some(record));
                let other = LmKey::new(&text[..text.len() - 1]).unwrap();
                assert_eq!(ValueRecord::read(&other, &memory), None, "a prefix");
                memory[0] ^= 1;
                assert_eq!(ValueRecord::read(&key, &memory), None);
            }
            assert_eq!(ValueRecord::read(&key, &[0; RECORD_BYTES]), None);
            assert_eq!(ValueRecord::read(&key, &[]), None);
        }
    }
}
