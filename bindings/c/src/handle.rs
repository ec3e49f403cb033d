//! Handles: numbers that stand for open pools.
//!
//! A handle is the index of a slot and the generation of what is in it, so that a closed or invented one
//! is refused without a look at any address. A slot is one word that calls enter and leave without a lock,
//! and a fork leaves nothing locked behind: in the child every slot in use is marked as the parent's.

use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::thread;

use crate::pool::Pool;
use crate::status::{Failure, kvik_status};

/// A pool: one engine's KV memory. Any thread may use it.
#[derive(Debug)]
pub struct kvik_pool {
    _opaque: [u8; 0],
}

/// More pools than a process can join ledgers of a few devices with.
const N_SLOTS: usize = 256;

/// Handles end like this, so that small numbers and aligned addresses are not handles.
const HANDLE_MARK: usize = 0xb;
const INDEX_SHIFT: u32 = 4;
const GENERATION_SHIFT: u32 = 12;

static SLOTS: [Slot; N_SLOTS] =
    [const { Slot { word: AtomicU64::new(0), pool: AtomicPtr::new(ptr::null_mut()) } }; N_SLOTS];

static FORK_HANDLER: Once = Once::new();

/// The place of one pool.
struct Slot {
    /// A [`Word`].
    word: AtomicU64,
    /// Set while the slot is open.
    pool: AtomicPtr<Pool>,
}

/// Generation, state and number of calls that are in a slot: 32, 8 and 24 bits.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Word {
    generation: u32,
    state: State,
    n_calls: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    /// Being opened, or closed while calls are in it.
    Busy,
    Open,
    /// A pool of the parent process, of which this one has a copy that must not be touched.
    Forked,
}

/// A call that is in a slot.
struct Visit<'a> {
    slot: &'a Slot,
    pool: &'a Pool,
}

/// Puts a pool into a slot; the handle is never NULL.
pub(crate) fn insert(pool: Box<Pool>) -> Result<*mut kvik_pool, Failure> {
    // SAFETY: the handler only stores to atomics, which is allowed in the child of a process with threads.
    FORK_HANDLER.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(mark_forked));
    });
    // A copy of the parent's pool is only overwritten when there is no other place.
    for usable in [State::Free, State::Forked] {
        for (index, slot) in SLOTS.iter().enumerate() {
            let word = slot.load();
            if word.state != usable {
                continue;
            }
            let generation = word.generation.wrapping_add(1);
            if slot.exchange(word, Word { generation, state: State::Busy, n_calls: 0 }) {
                // What a forked slot had is the parent's: it is left alone, not dropped.
                slot.pool.store(Box::into_raw(pool), Ordering::Release);
                slot.store(Word { generation, state: State::Open, n_calls: 0 });
                return Ok(encode(index, generation));
            }
        }
    }
    Err(Failure::invalid(format!("{N_SLOTS} pools are open: close one to open another")))
}

/// Calls `work` with the pool behind a handle, which is not closed meanwhile.
pub(crate) fn with<T>(handle: *const kvik_pool, work: impl FnOnce(&Pool) -> T) -> Result<T, Failure> {
    let visit = Visit::enter(handle)?;
    Ok(work(visit.pool))
}

/// Takes the pool out of its slot when the last call has left it; the handle is refused from now on.
pub(crate) fn remove(handle: *const kvik_pool) -> Result<Box<Pool>, Failure> {
    let (slot, generation) = decode(handle)?;
    loop {
        let word = slot.check(generation)?;
        if slot.exchange(word, Word { state: State::Busy, ..word }) {
            break;
        }
    }
    while slot.load().n_calls > 0 {
        thread::yield_now();
    }
    let pool = slot.pool.swap(ptr::null_mut(), Ordering::AcqRel);
    slot.store(Word { generation, state: State::Free, n_calls: 0 });
    // SAFETY: `insert` made it of a box; this thread alone moved the slot from open to busy, and no call
    // is in it.
    Ok(unsafe { Box::from_raw(pool) })
}

/// Runs in a forked child, where no other thread exists.
extern "C" fn mark_forked() {
    for slot in &SLOTS {
        let word = slot.load();
        if word.state != State::Free {
            slot.store(Word { state: State::Forked, n_calls: 0, ..word });
        }
    }
}

fn encode(index: usize, generation: u32) -> *mut kvik_pool {
    let number = (generation as usize) << GENERATION_SHIFT | index << INDEX_SHIFT | HANDLE_MARK;
    ptr::without_provenance_mut(number)
}

fn decode(handle: *const kvik_pool) -> Result<(&'static Slot, u32), Failure> {
    let number = handle.addr();
    if number == 0 {
        return Err(Failure::new(kvik_status::KVIK_ERROR_HANDLE, "the pool is NULL"));
    }
    let index = number >> INDEX_SHIFT & (N_SLOTS - 1);
    let generation = (number >> GENERATION_SHIFT) as u32;
    if encode(index, generation).addr() != number {
        return Err(not_a_pool());
    }
    Ok((&SLOTS[index], generation))
}

fn not_a_pool() -> Failure {
    Failure::new(kvik_status::KVIK_ERROR_HANDLE, "the pool is closed, or never was one")
}

impl Visit<'_> {
    fn enter(handle: *const kvik_pool) -> Result<Self, Failure> {
        let (slot, generation) = decode(handle)?;
        loop {
            let word = slot.check(generation)?;
            if slot.exchange(word, Word { n_calls: word.n_calls + 1, ..word }) {
                // SAFETY: the slot was open when this call entered it, and is not emptied before it leaves.
                let pool = unsafe { &*slot.pool.load(Ordering::Acquire) };
                return Ok(Self { slot, pool });
            }
        }
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.slot.word.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Slot {
    /// The word, if the slot has an open pool of this generation.
    fn check(&self, generation: u32) -> Result<Word, Failure> {
        let word = self.load();
        match word.state {
            _ if word.generation != generation => Err(not_a_pool()),
            State::Open => Ok(word),
            State::Forked => Err(Failure::new(
                kvik_status::KVIK_ERROR_FORKED,
                "the pool belongs to the parent process: open a new one after fork",
            )),
            State::Free | State::Busy => Err(not_a_pool()),
        }
    }

    fn load(&self) -> Word {
        Word::from_bits(self.word.load(Ordering::Acquire))
    }

    fn store(&self, word: Word) {
        self.word.store(word.bits(), Ordering::Release);
    }

    fn exchange(&self, old: Word, new: Word) -> bool {
        self.word.compare_exchange(old.bits(), new.bits(), Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

impl Word {
    fn bits(self) -> u64 {
        u64::from(self.generation) << 32 | (self.state as u64) << 24 | u64::from(self.n_calls)
    }

    fn from_bits(bits: u64) -> Self {
        let state = match bits >> 24 & 0xff {
            0 => State::Free,
            1 => State::Busy,
            2 => State::Open,
            _ => State::Forked,
        };
        Self { generation: (bits >> 32) as u32, state, n_calls: (bits & 0xff_ffff) as u32 }
    }
}
