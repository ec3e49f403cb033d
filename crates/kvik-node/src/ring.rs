//! Two queues in memory that a client and the daemon share, one in each direction.
//!
//! Each has one producer and one consumer. The producer writes an entry and then the tail; the consumer reads entries
//! up to the tail and then writes the head. Both positions only grow. A side keeps its own position to itself and
//! never reads it back, so that a peer that writes garbage can make a ring seem full, empty or broken, and nothing else.
//!
//! A consumer that finds its ring empty may sleep: it says so in a word, looks once more and waits on a counter of
//! wake-ups. The producer wakes only a sleeper. The two look at each other's word after a fence, so at least one sees the other.
//!
//! [`RingWords`] is the memory, so that a model can run the same code in every order that memory allows.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use kvik_tier::shared::SharedWords;

/// Words of an entry: a cache line.
pub(crate) const ENTRY_WORDS: usize = 8;

/// One entry of a ring.
pub(crate) type Entry = [u64; ENTRY_WORDS];

/// Entries of a ring, a power of two.
pub(crate) const N_ENTRIES: u64 = 256;

/// Words between two that different sides write: two cache lines, because processors fetch lines in pairs.
const LINE: usize = 16;

/// Words for names, digests and offsets of chunks: room for the digests of two million tokens in chunks of 256.
pub(crate) const PAYLOAD_WORDS: usize = 32 << 10;

const FIRST_ENTRY: usize = 8 * LINE;
const RING_WORDS: usize = N_ENTRIES as usize * ENTRY_WORDS;

/// The first word of the payload.
pub(crate) const PAYLOAD: usize = FIRST_ENTRY + 2 * RING_WORDS;

/// A word that the daemon sets when it ends the session because another daemon takes over. It lies beside the tail of the
/// answers, which only the daemon writes.
pub(crate) const MOVED: usize = 4 * LINE + 1;

/// Words of all of it.
pub(crate) const SESSION_WORDS: usize = PAYLOAD + PAYLOAD_WORDS;

/// From the client to the daemon.
pub(crate) const SUBMISSIONS: Places = Places::new(0);

/// From the daemon to the client.
pub(crate) const COMPLETIONS: Places = Places::new(1);

/// Memory that both sides see.
pub(crate) trait RingWords {
    /// Reads a word.
    fn load(&self, word: usize, ordering: Ordering) -> u64;

    /// Writes a word.
    fn store(&self, word: usize, value: u64, ordering: Ordering);

    /// Adds 1 to a word, with release.
    fn increment(&self, word: usize);

    /// A fence that all sides agree on the order of.
    fn fence(&self);

    /// Sleeps while a word is `seen`, for at most `timeout`, until it is woken.
    fn wait(&self, word: usize, seen: u64, timeout: Duration);

    /// Wakes those that sleep at a word.
    fn wake(&self, word: usize);
}

impl RingWords for SharedWords {
    fn load(&self, word: usize, ordering: Ordering) -> u64 {
        self.words()[word].load(ordering)
    }

    fn store(&self, word: usize, value: u64, ordering: Ordering) {
        self.words()[word].store(value, ordering);
    }

    fn increment(&self, word: usize) {
        self.words()[word].fetch_add(1, Ordering::Release);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn wait(&self, word: usize, seen: u64, timeout: Duration) {
        Self::wait(self, word, seen, timeout);
    }

    fn wake(&self, word: usize) {
        Self::wake(self, word);
    }
}

/// Where the words of one ring are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places {
    tail: usize,
    head: usize,
    wake_ups: usize,
    sleeps: usize,
    entries: usize,
}

/// The peer wrote a position that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BrokenRing;

/// The writing side of a ring.
#[derive(Debug)]
pub(crate) struct Producer<W = SharedWords> {
    words: Arc<W>,
    places: Places,
    tail: u64,
}

/// The reading side of a ring.
#[derive(Debug)]
pub(crate) struct Consumer<W = SharedWords> {
    words: Arc<W>,
    places: Places,
    head: u64,
}

// === impl Places ===

impl Places {
    const fn new(number: usize) -> Self {
        let first = 4 * number * LINE;
        Self {
            tail: first,
            head: first + LINE,
            wake_ups: first + 2 * LINE,
            sleeps: first + 3 * LINE,
            entries: FIRST_ENTRY + number * RING_WORDS,
        }
    }

    /// The words of an entry.
    fn entry(self, position: u64) -> Range<usize> {
        let first = self.entries + (position % N_ENTRIES) as usize * ENTRY_WORDS;
        first..first + ENTRY_WORDS
    }
}

// === impl Producer ===

impl<W: RingWords> Producer<W> {
    /// The first producer of a ring of zeros.
    pub(crate) fn new(words: Arc<W>, places: Places) -> Self {
        Self { words, places, tail: 0 }
    }

    /// Appends an entry; false where the ring is full.
    pub(crate) fn push(&mut self, entry: Entry) -> Result<bool, BrokenRing> {
        let is_pushed = self.push_quietly(entry)?;
        if is_pushed {
            self.wake_sleeper();
        }
        Ok(is_pushed)
    }

    /// Appends an entry without waking the consumer: [`Self::wake_sleeper`] MUST follow before the producer waits.
    pub(crate) fn push_quietly(&mut self, entry: Entry) -> Result<bool, BrokenRing> {
        let words = &*self.words;
        // Acquire: the entry that is written over was read before the head passed it.
        let n_used = self.tail.wrapping_sub(words.load(self.places.head, Ordering::Acquire));
        if n_used > N_ENTRIES {
            return Err(BrokenRing);
        }
        if n_used == N_ENTRIES {
            return Ok(false);
        }
        for (word, value) in self.places.entry(self.tail).zip(entry) {
            words.store(word, value, Ordering::Relaxed);
        }
        self.tail = self.tail.wrapping_add(1);
        words.store(self.places.tail, self.tail, Ordering::Release);
        Ok(true)
    }

    /// Wakes the consumer, if it sleeps, for all that was appended.
    pub(crate) fn wake_sleeper(&self) {
        let words = &*self.words;
        words.fence();
        if words.load(self.places.sleeps, Ordering::Relaxed) != 0 {
            words.increment(self.places.wake_ups);
            words.wake(self.places.wake_ups);
        }
    }

    /// Whether the consumer seems to sleep: a hint, which may be old.
    pub(crate) fn has_sleeper(&self) -> bool {
        self.words.load(self.places.sleeps, Ordering::Relaxed) != 0
    }
}

// === impl Consumer ===

impl<W: RingWords> Consumer<W> {
    /// The first consumer of a ring of zeros.
    pub(crate) fn new(words: Arc<W>, places: Places) -> Self {
        Self { words, places, head: 0 }
    }

    /// Takes the oldest entry; `None` where the ring is empty.
    pub(crate) fn pop(&mut self) -> Result<Option<Entry>, BrokenRing> {
        let words = &*self.words;
        let n_used = words.load(self.places.tail, Ordering::Acquire).wrapping_sub(self.head);
        if n_used > N_ENTRIES {
            return Err(BrokenRing);
        }
        if n_used == 0 {
            return Ok(None);
        }
        let first = self.places.entry(self.head).start;
        let entry = std::array::from_fn(|index| words.load(first + index, Ordering::Relaxed));
        self.head = self.head.wrapping_add(1);
        words.store(self.places.head, self.head, Ordering::Release);
        Ok(Some(entry))
    }

    /// Whether there seems to be an entry: a hint, which may be old.
    pub(crate) fn has_entry(&self) -> bool {
        self.words.load(self.places.tail, Ordering::Relaxed) != self.head
    }

    /// The wake-ups so far. Read it before everything that decides whether to wait: a wake-up after it ends the wait.
    pub(crate) fn wake_ups(&self) -> u64 {
        self.words.load(self.places.wake_ups, Ordering::Acquire)
    }

    /// Waits until there may be an entry, a wake-up after the first `seen` has come, or `timeout` has passed.
    pub(crate) fn wait(&self, seen: u64, timeout: Duration) {
        let words = &*self.words;
        words.store(self.places.sleeps, 1, Ordering::Relaxed);
        words.fence();
        if words.load(self.places.tail, Ordering::Acquire) == self.head {
            words.wait(self.places.wake_ups, seen, timeout);
        }
        words.store(self.places.sleeps, 0, Ordering::Relaxed);
    }

    /// Ends the wait of this consumer, from another thread of its own process, also one that is about to begin with an
    /// earlier count of wake-ups.
    pub(crate) fn interrupt(words: &W, places: Places) {
        words.increment(places.wake_ups);
        words.wake(places.wake_ups);
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    fn ring() -> (Arc<SharedWords>, Producer, Consumer) {
        let words = Arc::new(SharedWords::create(SESSION_WORDS).unwrap());
        // Mapped twice, as in two processes.
        let other = SharedWords::map(words.as_fd().try_clone_to_owned().unwrap(), SESSION_WORDS).unwrap();
        let producer = Producer::new(Arc::clone(&words), SUBMISSIONS);
        (words, producer, Consumer::new(Arc::new(other), SUBMISSIONS))
    }

    #[test]
    fn entries_come_out_in_order_and_a_full_ring_says_so() {
        let (_, mut producer, mut consumer) = ring();
        for lap in 0..3_u64 {
            for number in 0..N_ENTRIES {
                assert_eq!(producer.push([lap * 1000 + number; ENTRY_WORDS]), Ok(true));
            }
            assert_eq!(producer.push([7; ENTRY_WORDS]), Ok(false));
            for number in 0..N_ENTRIES {
                assert_eq!(consumer.pop(), Ok(Some([lap * 1000 + number; ENTRY_WORDS])));
            }
            assert_eq!(consumer.pop(), Ok(None));
        }
    }

    #[test]
    fn two_threads_pass_a_million_entries_and_lose_no_wake_up() {
        const N: u64 = 1_000_000;
        let (_, mut producer, mut consumer) = ring();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for number in 0..N {
                    while !producer.push([number; ENTRY_WORDS]).unwrap() {
                        std::thread::yield_now();
                    }
                }
            });
            let mut next = 0;
            while next < N {
                let seen = consumer.wake_ups();
                match consumer.pop().unwrap() {
                    Some(entry) => {
                        assert_eq!(entry, [next; ENTRY_WORDS]);
                        next += 1;
                    }
                    // Longer than the test may take: a lost wake-up shows.
                    None => consumer.wait(seen, Duration::from_mins(10)),
                }
            }
        });
    }

    #[test]
    fn positions_that_cannot_be_are_found() {
        let (words, mut producer, mut consumer) = ring();
        for tail in [N_ENTRIES + 1, u64::MAX, 1 << 63] {
            words.words()[SUBMISSIONS.tail].store(tail, Ordering::Relaxed);
            assert_eq!(consumer.pop(), Err(BrokenRing), "{tail}");
        }
        for head in [1, N_ENTRIES, u64::MAX - N_ENTRIES] {
            words.words()[SUBMISSIONS.head].store(head, Ordering::Relaxed);
            assert_eq!(producer.push([0; ENTRY_WORDS]), Err(BrokenRing), "{head}");
        }
    }
}
