//! Values of LMCache's clients in a store.
//!
//! A value is two chunks. The first, a record, is found by the value's key and has the same length for all; it says how long
//! the value is, what it is to its owner, and the name of the second, which has the bytes. Every value gets a second
//! chunk of its own, so that a value that takes the place of another is visible as a whole or not at all.
//!
//! Chunks are in namespaces of their own, which no engine that attaches has. They are kept, evicted and written to
//! lower tiers as all others; a value one of whose chunks is gone is gone.

use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::time::Duration;

use kvik_store::{Chain, ChunkFormat, ChunkWriter, Commit, Retrieved, Space, Store, Write};
use kvik_tier::{LmForm, LmKey, LmSource, LmWriter};
use kvik_types::{BlockSize, Dtype, Namespace};
use parking_lot::Mutex;
use rustix::rand::{GetRandomFlags, getrandom};

use super::record::{BodyId, RECORD_BYTES, ValueRecord};
use crate::error::{NodeError, Result};

/// Keys are divided among so many locks; of the values of one, one at a time takes its place.
const N_STRIPES: usize = 64;

/// How often a record is written again that a read of the one before has kept out.
const MAX_TRIES: usize = 16;

/// The values of a tenant.
#[derive(Debug)]
pub(crate) struct StoreValues {
    store: Store,
    records: Space,
    bodies: Namespace,
    stripes: Vec<Mutex<()>>,
    stripe_of: RandomState,
}

/// A value that is being received.
struct ValueWriter<'a> {
    values: &'a StoreValues,
    body: BodyId,
    writer: ChunkWriter,
    n_bytes: usize,
}

impl StoreValues {
    /// The values in the store of a tenant.
    ///
    /// # Errors
    /// If the store's chunks cannot have a record.
    pub(crate) fn try_new(tenant: &str, store: Store) -> Result<Self> {
        let namespace = |layout: &str| Namespace {
            model: "values of LMCache".to_owned(),
            dtype: Dtype::U8,
            layout: layout.to_owned(),
            tenant: tenant.to_owned(),
        };
        let format = format_of(&store, RECORD_BYTES);
        let records = store.space(&namespace("records"), format).map_err(NodeError::opening)?;
        let bodies = namespace("bodies");
        let stripes = (0..N_STRIPES).map(|_| Mutex::default()).collect();
        Ok(Self { store, records, bodies, stripes, stripe_of: RandomState::new() })
    }

    fn record_chain(&self, key: &LmKey) -> Option<Chain> {
        self.records.chain_of_keys([key.as_str().as_bytes()])
    }

    fn body_chain(&self, body: BodyId, n_bytes: usize) -> Option<Chain> {
        let space = self.store.space(&self.bodies, format_of(&self.store, n_bytes)).ok()?;
        space.chain_of_keys([body.0.as_slice()])
    }

    fn record(&self, key: &LmKey) -> Option<ValueRecord> {
        let chain = self.record_chain(key)?;
        let retrieved = self.store.retrieve(&chain, 0);
        let record = ValueRecord::read(key, payload(&retrieved)?);
        self.store.note_request(&chain, None);
        record
    }

    fn body(&self, record: &ValueRecord) -> Option<Retrieved> {
        let chain = self.body_chain(record.body, record.n_bytes)?;
        let retrieved = self.store.retrieve(&chain, 0);
        self.store.note_request(&chain, None);
        payload(&retrieved).is_some_and(|bytes| bytes.len() >= record.n_bytes).then_some(retrieved)
    }

    /// Whether the value of a record is these bytes.
    fn is_same(&self, record: &ValueRecord, form: LmForm, value: &[u8]) -> bool {
        let is_alike = record.form == form && record.n_bytes == value.len();
        is_alike && self.body(record).is_some_and(|body| value_of(&body, record) == Some(value))
    }

    /// Removes the record of a key, wherever it is, and the bytes of its value.
    fn drop_record(&self, chain: &Chain, record: &ValueRecord) {
        self.store.forget(chain, self.store.options().retrieve_timeout);
        self.drop_body(record);
    }

    /// Removes the bytes of a value that no record names.
    fn drop_body(&self, record: &ValueRecord) {
        if let Some(body) = self.body_chain(record.body, record.n_bytes) {
            self.store.forget(&body, Duration::ZERO);
        }
    }

    /// Writes the record of a value; false where there is no memory for it.
    fn write_record(&self, key: &LmKey, chain: &Chain, record: &ValueRecord) -> bool {
        for _ in 0..MAX_TRIES {
            match self.store.begin_write(chain, 0, 0) {
                Write::Slot(mut writer) => {
                    record.write(key, writer.payload_mut());
                    if writer.commit() == Commit::Stored {
                        return true;
                    }
                }
                Write::Present => {}
                Write::NoRoom | Write::NoParent | Write::Collision => return false,
            }
            // A read of the record that was there has brought it back, or all of the store was cleared.
            self.store.forget(chain, Duration::ZERO);
        }
        false
    }

    fn stripe(&self, key: &LmKey) -> &Mutex<()> {
        &self.stripes[self.stripe_of.hash_one(key) as usize % N_STRIPES]
    }
}

impl LmSource for StoreValues {
    fn exists(&self, key: &LmKey) -> bool {
        let body = self.record(key).and_then(|record| self.body_chain(record.body, record.n_bytes));
        body.is_some_and(|chain| self.store.lookup(&chain).n_chunks == 1)
    }

    fn read(&self, key: &LmKey, send: &mut dyn FnMut(LmForm, &[u8]) -> io::Result<()>) -> io::Result<bool> {
        let Some(record) = self.record(key) else { return Ok(false) };
        let Some(body) = self.body(&record) else { return Ok(false) };
        let Some(value) = value_of(&body, &record) else { return Ok(false) };
        send(record.form, value)?;
        Ok(true)
    }

    fn begin(&self, n_bytes: usize) -> Option<Box<dyn LmWriter + '_>> {
        let mut body = [0; 16];
        // So few bytes come as a whole.
        getrandom(&mut body, GetRandomFlags::empty()).ok().filter(|n_random| *n_random == body.len())?;
        let body = BodyId(body);
        match self.store.begin_write(&self.body_chain(body, n_bytes)?, 0, 0) {
            Write::Slot(writer) => Some(Box::new(ValueWriter { values: self, body, writer, n_bytes })),
            _ => None,
        }
    }

    fn remove(&self, key: &LmKey) {
        let _stripe = self.stripe(key).lock();
        if let (Some(chain), Some(record)) = (self.record_chain(key), self.record(key)) {
            self.drop_record(&chain, &record);
        }
    }
}

impl LmWriter for ValueWriter<'_> {
    fn memory(&mut self) -> &mut [u8] {
        &mut self.writer.payload_mut()[..self.n_bytes]
    }

    /// A value that is there with the same bytes stays, so that it is not written to lower tiers again.
    fn commit(self: Box<Self>, key: &LmKey, form: LmForm) {
        let Self { values, body, mut writer, n_bytes } = *self;
        let Some(chain) = values.record_chain(key) else { return };
        // What is behind the value is stored too.
        writer.payload_mut()[n_bytes..].fill(0);
        let _stripe = values.stripe(key).lock();
        let before = values.record(key);
        if before.is_some_and(|before| values.is_same(&before, form, &writer.payload()[..n_bytes])) {
            return;
        }
        if writer.commit() != Commit::Stored {
            return;
        }
        if let Some(before) = before {
            values.drop_record(&chain, &before);
        }
        let record = ValueRecord { n_bytes, form, body };
        if !values.write_record(key, &chain, &record) {
            values.drop_body(&record);
        }
    }
}

/// The format of chunks of at least so many bytes: one rank, one layer, and as few bytes more as the store's chunk
/// length allows.
fn format_of(store: &Store, n_bytes: usize) -> ChunkFormat {
    let block_tokens: BlockSize = store.options().chunk_tokens;
    let token_layer_bytes = n_bytes.div_ceil(block_tokens.get()).max(1) as u64;
    ChunkFormat { n_layers: 1, token_layer_bytes, n_ranks: 1, block_tokens }
}

fn payload(retrieved: &Retrieved) -> Option<&[u8]> {
    retrieved.chunks().first().map(|chunk| chunk.payload(0))
}

fn value_of<'a>(body: &'a Retrieved, record: &ValueRecord) -> Option<&'a [u8]> {
    payload(body)?.get(..record.n_bytes)
}
