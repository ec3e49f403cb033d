//! A book on a Redis or Valkey server, or a cluster of them, that several gateways share.
//!
//! A *register* and one string for each block:
//!
//! ```text
//! kvik:{<hash of model, naming>}:r              hash: s<rank, worker> -> record of a source
//!                                                     h<holder>       -> tier, rank, worker
//!                                                     n               -> number of the last holder
//! kvik:{<hash of model, naming>}:b:<8 bytes>    string: holder (5 bytes), count (3 bytes), sorted, repeated
//! ```
//!
//! A *holder* is a source in a tier during one life: a restart, a clear or a removal takes its number out of
//! the register in constant time, and what blocks say of it counts no more. Dead holders leave a block's
//! value when it is next written, and blocks of dead holders only leave when a lookup meets them or when they
//! expire. Numbers of holders are not used again, even if the register is lost.
//!
//! * Every change and every lookup is one script in one round trip; its keys are named, so a cluster refuses
//!   it as a whole while their slot is moving, and nothing is half done. A batch or replacement of more than
//!   4096 blocks is several calls. How far a batch has come is part of the source's record, so each part
//!   counts once, whichever gateway delivers it, and the number of the batch is done with the last one. A replacement
//!   is stored under pending holders that do not count until its last call.
//! * All gateways may deliver all batches: the scripts judge epochs and numbers as the in-memory index does.
//!   An engine without epochs counts as restarted if the number falls and the time of publishing rises;
//!   if only the number falls, another gateway was faster. A batch that is not behind and was published
//!   before the last one that was applied is of an earlier life. A replayed batch is the engine's own answer
//!   and is not held against the clock.
//! * Numbers of 64 bits stay strings of eight bytes: the numbers of scripts are doubles.
//! * A block that is stored again is counted, up to 2^24 - 1, and leaves with as many removals.
//! * Blocks expire after [`RedisOptions::block_ttl`] without a store, the register after twice that without a
//!   change. Eviction by the server loses blocks or, with the register, the whole book: both are misses, and
//!   the next batch of every source is then a gap, which its feed replays.
//! * A source that one gateway removes comes back with a batch that another one still delivers, until that
//!   one removes it too.
//! * [`Backend::blocks_of`] scans all keys of one server, page by page: it is for administrators, and what
//!   changes meanwhile may be in it or not.
//! * There is no bound on blocks but the server's memory.
//!
//! A call that ran out of time may still be done. To make it again is safe: a batch is then a duplicate.

mod client;
mod namings;
mod operations;
mod record;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _};
use kvik_index::holders::{BlockKey, Event, HolderIndex, IndexError, N_TIERS, SourceName, Verdict, Walk};
use redis::{Cmd, FromRedisValue as _, Value};

pub use client::RedisClient;

use self::client::{Script, misunderstood, unavailable};
use self::operations::{MAX_CALL_KEYS, Part, part};
use self::record::{BookKeys, option_bytes, source_bytes, source_name, source_state, time_bytes};
use super::{Backend, KeyedBatch, KeyedHolding, Row, SourceBlocks, SourceState};
use crate::error::Result;

const REGISTER: &str = include_str!("lua/register.lua");
static APPLY: LazyLock<Script> =
    LazyLock::new(|| Script::new("apply a batch", &[REGISTER, include_str!("lua/apply.lua")]));
static REPLACE: LazyLock<Script> =
    LazyLock::new(|| Script::new("replace a source", &[REGISTER, include_str!("lua/replace.lua")]));
static SKIP_GAP: LazyLock<Script> =
    LazyLock::new(|| Script::new("skip a gap", &[REGISTER, include_str!("lua/skip_gap.lua")]));
static REMOVE_SOURCE: LazyLock<Script> =
    LazyLock::new(|| Script::new("remove a source", &[REGISTER, include_str!("lua/remove_source.lua")]));
static FORGET: LazyLock<Script> =
    LazyLock::new(|| Script::new("forget blocks", &[REGISTER, include_str!("lua/forget.lua")]));
static LOOKUP: LazyLock<Script> =
    LazyLock::new(|| Script::new("look up blocks", &[include_str!("lua/lookup.lua")]));

/// How often a batch is begun again because other gateways do parts of it.
const MAX_OVERTAKINGS: usize = 64;
/// Keys of one page of a scan.
const SCAN_PAGE: usize = 1000;
/// Keys that the server looks at in a call at least, even for a small page.
const MIN_SCAN_PAGE: usize = 100;
/// Calls to the server that a page of blocks takes at most: the server may have many keys beside the book's.
const MAX_PAGE_SCANS: usize = 100;

/// How a client talks to its servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedisOptions {
    /// The longest time to open a connection; default 1 s.
    pub connect_timeout: Duration,
    /// The longest time of a lookup, which a request waits for; default 50 ms.
    pub lookup_timeout: Duration,
    /// The longest time of any other call; default 1 s.
    pub write_timeout: Duration,
    /// How long a block stays that is not stored again; default 24 h, zero is for ever. Whole seconds.
    pub block_ttl: Duration,
    /// The number of the first batch of an epoch; default 0.
    pub first_sequence: u64,
    /// What all keys begin with; default `kvik`.
    pub key_prefix: String,
    /// Authorities to trust instead of those of the system, as a PEM file; default none.
    pub ca_file: Option<PathBuf>,
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(1),
            lookup_timeout: Duration::from_millis(50),
            write_timeout: Duration::from_secs(1),
            block_ttl: Duration::from_hours(24),
            first_sequence: 0,
            key_prefix: "kvik".into(),
            ca_file: None,
        }
    }
}

/// A book on a server.
#[derive(Debug)]
pub struct RedisBackend {
    client: Arc<RedisClient>,
    options: RedisOptions,
    keys: BookKeys,
}

impl RedisBackend {
    /// The book of a model whose engines name blocks in one way; `naming` tells ways apart. Nothing is sent.
    pub fn new(client: Arc<RedisClient>, options: &RedisOptions, model: &str, naming: &str) -> Self {
        let keys = BookKeys::new(&options.key_prefix, model, naming);
        Self { client, options: options.clone(), keys }
    }

    fn ttl_s(&self) -> u64 {
        self.options.block_ttl.as_secs()
    }

    /// Runs a writing script on the register and some blocks.
    async fn write(&self, script: &Script, keys: &[BlockKey], arguments: &[&[u8]]) -> Result<Value> {
        let build = |command: &mut Cmd| {
            self.write_keys(keys, command);
            for argument in arguments {
                command.arg(*argument);
            }
        };
        self.client.run(script, self.options.write_timeout, build).await
    }

    fn write_keys(&self, keys: &[BlockKey], command: &mut Cmd) {
        command.arg(keys.len() + 1).arg(self.keys.register.as_slice());
        let mut name = Vec::new();
        for key in keys {
            self.keys.write_block(*key, &mut name);
            command.arg(name.as_slice());
        }
    }

    async fn apply_batch(&self, source: &SourceName, batch: KeyedBatch<'_>) -> Result<Verdict> {
        check_name(source)?;
        let name = source_bytes(source);
        let (epoch, following) = (option_bytes(batch.epoch), option_bytes(batch.sequence.checked_add(1)));
        let (sequence, first) = (batch.sequence.to_be_bytes(), self.options.first_sequence.to_be_bytes());
        let published = time_bytes(batch.published_s);
        let ttl_s = self.ttl_s().to_string();
        let is_replayed: &[u8] = if batch.replayed { b"1" } else { b"0" };
        let mut n_done = 0;
        let mut has_restarted = false;
        let mut n_overtakings = 0;
        loop {
            let Part { operations, keys, n_units, is_last } = part(batch.events.iter().copied(), n_done);
            let (n_done_text, n_units_text) = (n_done.to_string(), n_units.to_string());
            let arguments: [&[u8]; 12] = [
                &name,
                &epoch,
                &sequence,
                &following,
                is_replayed,
                &published,
                &first,
                n_done_text.as_bytes(),
                n_units_text.as_bytes(),
                if is_last { b"1" } else { b"0" },
                ttl_s.as_bytes(),
                &operations,
            ];
            let answer = self.write(&APPLY, &keys, &arguments).await?;
            let (code, detail, restarted) = <(i64, Vec<u8>, i64)>::from_redis_value(answer)
                .map_err(|_| misunderstood(APPLY.operation))?;
            has_restarted |= restarted == 1;
            return Ok(match code {
                1 if has_restarted => Verdict::Restarted,
                1 => Verdict::Applied,
                2 => Verdict::Restarted,
                3 => Verdict::Duplicate,
                4 => {
                    let expected = detail.try_into().map_err(|_| misunderstood(APPLY.operation))?;
                    Verdict::Gap { expected: u64::from_be_bytes(expected), got: batch.sequence }
                }
                5 => Verdict::OldEpoch,
                6 => {
                    let text = String::from_utf8(detail).ok();
                    let reached = text.and_then(|text| text.parse().ok());
                    let reached: usize = reached.ok_or_else(|| misunderstood(APPLY.operation))?;
                    if reached != n_done + n_units {
                        n_overtakings += 1;
                        if n_overtakings > MAX_OVERTAKINGS {
                            return Err(unavailable(APPLY.operation, "other gateways are in the way".into()));
                        }
                    }
                    n_done = reached;
                    continue;
                }
                _ => return Err(misunderstood(APPLY.operation)),
            });
        }
    }

    async fn replace_source(&self, source: &SourceName, holding: KeyedHolding<'_>) -> Result<bool> {
        check_name(source)?;
        let name = source_bytes(source);
        let epoch = option_bytes(holding.epoch);
        let (next, first) = (holding.next_sequence.to_be_bytes(), self.options.first_sequence.to_be_bytes());
        let ttl_s = self.ttl_s().to_string();
        let mut token = Vec::new();
        let mut n_done = 0;
        loop {
            let runs = holding.runs.iter();
            let events = runs.map(|(tier, keys)| Event::Stored { tier: *tier, parent: None, keys });
            let Part { operations, keys, n_units, is_last } = part(events, n_done);
            n_done += n_units;
            let is_last: &[u8] = if is_last { b"1" } else { b"0" };
            let arguments: [&[u8]; 8] =
                [&name, &epoch, &next, &first, &token, is_last, ttl_s.as_bytes(), &operations];
            let answer = self.write(&REPLACE, &keys, &arguments).await?;
            let (code, new_token) =
                <(i64, Vec<u8>)>::from_redis_value(answer).map_err(|_| misunderstood(REPLACE.operation))?;
            match code {
                1 => return Ok(true),
                2 => return Ok(false),
                3 => token = new_token,
                4 => return Err(unavailable(REPLACE.operation, "another gateway has begun to".into())),
                _ => return Err(misunderstood(REPLACE.operation)),
            }
        }
    }

    async fn read_state(&self, source: &SourceName) -> Result<Option<(SourceState, [[u8; 5]; N_TIERS])>> {
        const OPERATION: &str = "read a source";
        let field = [b"s".as_slice(), &source_bytes(source)].concat();
        let mut command = redis::cmd("HGET");
        command.arg(self.keys.register.as_slice()).arg(field);
        let time_limit = self.options.write_timeout;
        let answer = self.client.command(OPERATION, time_limit, &command, &self.keys.register).await?;
        let record = Option::<Vec<u8>>::from_redis_value(answer).map_err(|_| misunderstood(OPERATION))?;
        Ok(record.and_then(|record| source_state(source.clone(), &record)))
    }

    async fn read_states(&self) -> Result<Vec<SourceState>> {
        const OPERATION: &str = "read all sources";
        let mut command = redis::cmd("HGETALL");
        command.arg(self.keys.register.as_slice());
        let time_limit = self.options.write_timeout;
        let answer = self.client.command(OPERATION, time_limit, &command, &self.keys.register).await?;
        let fields =
            Vec::<(Vec<u8>, Vec<u8>)>::from_redis_value(answer).map_err(|_| misunderstood(OPERATION))?;
        let states = fields.iter().filter_map(|(field, record)| {
            let name = field.strip_prefix(b"s")?;
            Some(source_state(source_name(name)?, record)?.0)
        });
        Ok(states.collect())
    }

    async fn find_rows(&self, keys: &[BlockKey], walk: Walk) -> Result<Vec<Row>> {
        let letter: &[u8] = if walk == Walk::All { b"A" } else { b"P" };
        let mut rows: Vec<Row> = Vec::new();
        for (call_idx, keys) in keys.chunks(MAX_CALL_KEYS).enumerate() {
            let build = |command: &mut Cmd| {
                self.write_keys(keys, command);
                command.arg(letter);
            };
            let answer = self.client.run(&LOOKUP, self.options.lookup_timeout, build).await?;
            let Value::Array(found) = answer else { return Err(misunderstood(LOOKUP.operation)) };
            let found = found.iter().map(|row| match row {
                Value::BulkString(bytes) => record::row(bytes),
                _ => None,
            });
            let found: Option<Vec<Row>> = found.collect();
            let found = found.ok_or_else(|| misunderstood(LOOKUP.operation))?;
            let n_before = (call_idx * MAX_CALL_KEYS) as u32;
            join_rows(&mut rows, found, n_before);
            let n_so_far = n_before + keys.len() as u32;
            if walk == Walk::Prefix && !rows.iter().any(|row| prefix_blocks(row) == n_so_far) {
                break;
            }
        }
        Ok(rows)
    }

    async fn list_blocks(
        &self,
        source: &SourceName,
        from: Option<u64>,
        limit: usize,
    ) -> Result<SourceBlocks> {
        const OPERATION: &str = "list the blocks of a source";
        let time_limit = self.options.write_timeout;
        let Some((_, holders)) = self.read_state(source).await? else { return Ok(SourceBlocks::default()) };
        let pattern = [self.keys.block_prefix.as_slice(), b"*"].concat();
        let mut listed = BTreeMap::new();
        // The server's cursor is the page's: it begins and ends at 0.
        let mut cursor = from.unwrap_or(0);
        let mut n_scans = 0;
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor)
                .arg("MATCH")
                .arg(&pattern)
                .arg("COUNT")
                .arg(limit.clamp(MIN_SCAN_PAGE, SCAN_PAGE));
            let page = self.client.command(OPERATION, time_limit, &scan, &self.keys.register).await?;
            let (next_cursor, names) =
                <(u64, Vec<Vec<u8>>)>::from_redis_value(page).map_err(|_| misunderstood(OPERATION))?;
            if !names.is_empty() {
                let mut read = redis::cmd("MGET");
                read.arg(&names);
                let values = self.client.command(OPERATION, time_limit, &read, &self.keys.register).await?;
                let values =
                    Vec::<Option<Vec<u8>>>::from_redis_value(values).map_err(|_| misunderstood(OPERATION))?;
                for (name, value) in names.iter().zip(values) {
                    let tiers = value.map_or(0, |value| record::tiers_of(&value, &holders));
                    if tiers != 0
                        && let Some(key) = self.keys.block(name)
                    {
                        listed.insert(key, tiers);
                    }
                }
            }
            cursor = next_cursor;
            n_scans += 1;
            if cursor == 0 || listed.len() >= limit || n_scans == MAX_PAGE_SCANS {
                let next = (cursor != 0).then_some(cursor);
                return Ok(SourceBlocks { blocks: listed.into_iter().collect(), next });
            }
        }
    }
}

impl Backend for RedisBackend {
    fn kind(&self) -> &'static str {
        "redis"
    }

    fn apply<'a>(&'a self, source: &'a SourceName, batch: KeyedBatch<'a>) -> BoxFuture<'a, Result<Verdict>> {
        self.apply_batch(source, batch).boxed()
    }

    fn replace<'a>(
        &'a self,
        source: &'a SourceName,
        holding: KeyedHolding<'a>,
    ) -> BoxFuture<'a, Result<bool>> {
        self.replace_source(source, holding).boxed()
    }

    fn skip_gap<'a>(&'a self, source: &'a SourceName, next: u64) -> BoxFuture<'a, Result<()>> {
        let skip = async move {
            let ttl_s = self.ttl_s().to_string();
            let arguments: [&[u8]; 3] = [&source_bytes(source), &next.to_be_bytes(), ttl_s.as_bytes()];
            self.write(&SKIP_GAP, &[], &arguments).await.map(drop)
        };
        skip.boxed()
    }

    fn state<'a>(&'a self, source: &'a SourceName) -> BoxFuture<'a, Result<Option<SourceState>>> {
        self.read_state(source).map(|state| Ok(state?.map(|(state, _)| state))).boxed()
    }

    fn states(&self) -> BoxFuture<'_, Result<Vec<SourceState>>> {
        self.read_states().boxed()
    }

    fn remove_source<'a>(&'a self, source: &'a SourceName) -> BoxFuture<'a, Result<bool>> {
        let remove = async move {
            let answer = self.write(&REMOVE_SOURCE, &[], &[&source_bytes(source)]).await?;
            Ok(answer == Value::Int(1))
        };
        remove.boxed()
    }

    fn forget<'a>(&'a self, source: &'a SourceName, keys: &'a [BlockKey]) -> BoxFuture<'a, Result<()>> {
        let forget = async move {
            for keys in keys.chunks(MAX_CALL_KEYS) {
                self.write(&FORGET, keys, &[&source_bytes(source)]).await?;
            }
            Ok(())
        };
        forget.boxed()
    }

    fn lookup<'a>(&'a self, keys: &'a [BlockKey], walk: Walk) -> BoxFuture<'a, Result<Vec<Row>>> {
        self.find_rows(keys, walk).boxed()
    }

    fn blocks_of<'a>(
        &'a self,
        source: &'a SourceName,
        from: Option<u64>,
        limit: usize,
    ) -> BoxFuture<'a, Result<SourceBlocks>> {
        self.list_blocks(source, from, limit).boxed()
    }
}

/// Adds what a further call found, behind the first `n_before` blocks.
fn join_rows(rows: &mut Vec<Row>, found: Vec<Row>, n_before: u32) {
    for mut more in found {
        if more.highest_block > 0 {
            more.highest_block += n_before;
        }
        match rows.iter_mut().find(|row| row.source == more.source) {
            Some(row) => {
                row.is_unsure |= more.is_unsure;
                row.highest_block = row.highest_block.max(more.highest_block);
                let has_all = prefix_blocks(row) == n_before;
                for tier in 0..N_TIERS {
                    row.covered_in[tier] += more.covered_in[tier];
                    row.prefix_in[tier] += if has_all { more.prefix_in[tier] } else { 0 };
                }
            }
            None if n_before == 0 => rows.push(more),
            None if more.highest_block > 0 => rows.push(Row { prefix_in: [0; N_TIERS], ..more }),
            None => {}
        }
    }
}

fn prefix_blocks(row: &Row) -> u32 {
    row.prefix_in.iter().sum()
}

/// Refuses the names that the in-memory index refuses.
fn check_name(source: &SourceName) -> Result<()> {
    let n_bytes = source.worker.len();
    if n_bytes == 0 || n_bytes > HolderIndex::MAX_NAME_BYTES {
        return Err(IndexError::BadName { n_bytes }.into());
    }
    Ok(())
}
