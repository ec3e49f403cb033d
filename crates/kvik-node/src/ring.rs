//! Two queues in memory that a client and the daemon share, one in each direction.
//!
//! Each has one producer and one consumer. The producer writes an entry and then the tail; the consumer reads entries
//! up to the tail and then writes the head. Both positions only grow. A side keeps its own position to itself and
//! never reads it back, so that a peer that writes garbage can make a ring seem full, empty or broken, and nothing else.
//!
//! A consumer that finds its ring empty may sleep: it says so in a word, looks once more and waits on a counter of
//! wake-ups. The producer wakes only a sleeper. The two look at each other's word after a fence, so at least one sees the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
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

/// Words of all of it.
pub(crate) const SESSION_WORDS: usize = PAYLOAD + PAYLOAD_WORDS;

/// From the client to the daemon.
pub(crate) const SUBMISSIONS: Places = Places::new(0);

/// From the daemon to the client.
pub(crate) const COMPLETIONS: Places = Places::new(1);

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
pub(crate) struct Producer {
    words: Arc<SharedWords>,
    places: Places,
    tail: u64,
}

/// The reading side of a ring.
#[derive(Debug)]
pub(crate) struct Consumer {
    words: Arc<SharedWords>,
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

    fn entry(self, words: &[AtomicU64], position: u64) -> &[AtomicU64] {
        let first = self.entries + (position % N_ENTRIES) as usize * ENTRY_WORDS;
        &words[first..first + ENTRY_WORDS]
    }

    /// Wakes the consumer if it sleeps. Call it after the tail was written.
    fn wake_sleeper(self, words: &SharedWords) {
        fence(Ordering::SeqCst);
        if words.words()[self.sleeps].load(Ordering::Relaxed) != 0 {
            words.words()[self.wake_ups].fetch_add(1, Ordering::Release);
            words.wake(self.wake_ups);
        }
    }
}

// === impl Producer ===

impl Producer {
    /// The first producer of a ring of zeros.
    pub(crate) fn new(words: Arc<SharedWords>, places: Places) -> Self {
        Self { words, places, tail: 0 }
    }

    /// Appends an entry; false where the ring is full.
    pub(crate) fn push(&mut self, entry: Entry) -> Result<bool, BrokenRing> {
        let words = self.words.words();
        // Acquire: the entry that is written over was read before the head passed it.
        let n_used = self.tail.wrapping_sub(words[self.places.head].load(Ordering::Acquire));
        if n_used > N_ENTRIES {
            return Err(BrokenRing);
        }
        if n_used == N_ENTRIES {
            return Ok(false);
        }
        for (word, value) in self.places.entry(words, self.tail).iter().zip(entry) {
            word.store(value, Ordering::Relaxed);
        }
        self.tail = self.tail.wrapping_add(1);
        words[self.places.tail].store(self.tail, Ordering::Release);
        self.places.wake_sleeper(&self.words);
        Ok(true)
    }
}

// === impl Consumer ===

impl Consumer {
    /// The first consumer of a ring of zeros.
    pub(crate) fn new(words: Arc<SharedWords>, places: Places) -> Self {
        Self { words, places, head: 0 }
    }

    /// Takes the oldest entry; `None` where the ring is empty.
    pub(crate) fn pop(&mut self) -> Result<Option<Entry>, BrokenRing> {
        let words = self.words.words();
        let n_used = words[self.places.tail].load(Ordering::Acquire).wrapping_sub(self.head);
        if n_used > N_ENTRIES {
            return Err(BrokenRing);
        }
        if n_used == 0 {
            return Ok(None);
        }
        let source = self.places.entry(words, self.head);
        let entry = std::array::from_fn(|index| source[index].load(Ordering::Relaxed));
        self.head = self.head.wrapping_add(1);
        words[self.places.head].store(self.head, Ordering::Release);
        Ok(Some(entry))
    }

    /// Waits until there may be an entry, or `timeout` has passed.
    pub(crate) fn wait(&self, timeout: Duration) {
        let words = self.words.words();
        let seen = words[self.places.wake_ups].load(Ordering::Acquire);
        words[self.places.sleeps].store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if words[self.places.tail].load(Ordering::Acquire) == self.head {
            self.words.wait(self.places.wake_ups, seen, timeout);
        }
        words[self.places.sleeps].store(0, Ordering::Relaxed);
    }

    /// Ends the wait of this consumer, from another thread of its own process.
    pub(crate) fn interrupt(words: &SharedWords, places: Places) {
        words.words()[places.wake_ups].fetch_add(1, Ordering::Release);
        words.wake(places.wake_ups);
    }
}

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
                match consumer.pop().unwrap() {
                    Some(entry) => {
                        assert_eq!(entry, [next; ENTRY_WORDS]);
                        next += 1;
                    }
                    // Longer than the test may take: a lost wake-up shows.
                    None => consumer.wait(Duration::from_mins(10)),
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
