//! The ring in every order of steps, and with every value, that memory allows, as long as a side is interrupted by the
//! other only a few times: two sides and a few entries.

use std::sync::atomic::Ordering;
use std::time::Duration;

use loom::sync::atomic::{AtomicU64, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::*;

/// Times that a thread loses the processor in the middle of its work. Most mistakes need one or two; three entries of
/// work with more take minutes.
const MAX_PREEMPTIONS: usize = 2;

/// The words of a model. Words that no test uses stay zero and need no model.
struct ModelWords {
    tail: AtomicU64,
    head: AtomicU64,
    wake_ups: AtomicU64,
    sleeps: AtomicU64,
    /// The first word of the first entries; the others are written and read in the same way.
    entries: [AtomicU64; 2],
    /// What the kernel holds while it compares a word and puts a thread to sleep.
    kernel: Mutex<()>,
    woken: Condvar,
}

impl ModelWords {
    fn new() -> Self {
        let word = || AtomicU64::new(0);
        Self {
            tail: word(),
            head: word(),
            wake_ups: word(),
            sleeps: word(),
            entries: [word(), word()],
            kernel: Mutex::new(()),
            woken: Condvar::new(),
        }
    }

    fn word(&self, word: usize) -> Option<&AtomicU64> {
        let places = SUBMISSIONS;
        match word {
            _ if word == places.tail => Some(&self.tail),
            _ if word == places.head => Some(&self.head),
            _ if word == places.wake_ups => Some(&self.wake_ups),
            _ if word == places.sleeps => Some(&self.sleeps),
            _ => {
                let offset = word.checked_sub(places.entries)?;
                self.entries.get(offset / ENTRY_WORDS).filter(|_| offset % ENTRY_WORDS == 0)
            }
        }
    }
}

impl RingWords for ModelWords {
    fn load(&self, word: usize, ordering: Ordering) -> u64 {
        self.word(word).map_or(0, |word| word.load(ordering))
    }

    fn store(&self, word: usize, value: u64, ordering: Ordering) {
        if let Some(word) = self.word(word) {
            word.store(value, ordering);
        }
    }

    fn increment(&self, word: usize) {
        if let Some(word) = self.word(word) {
            word.fetch_add(1, Ordering::Release);
        }
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn wait(&self, word: usize, seen: u64, _: Duration) {
        let kernel = self.kernel.lock().unwrap();
        if self.load(word, Ordering::Acquire) == seen {
            // Without a timeout: a wake-up that is lost is a thread that sleeps for ever, which the model finds.
            drop(self.woken.wait(kernel).unwrap());
        }
    }

    fn wake(&self, _: usize) {
        let kernel = self.kernel.lock().unwrap();
        self.woken.notify_all();
        drop(kernel);
    }
}

fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(MAX_PREEMPTIONS);
    builder.check(run);
}

#[test]
fn in_every_order_entries_arrive_whole_and_in_order_and_no_wake_up_is_lost() {
    two_entries_arrive(Producer::push);
}

#[test]
fn in_every_order_one_wake_up_is_enough_for_all_entries_before_it() {
    two_entries_arrive(|producer, entry| {
        let is_pushed = producer.push_quietly(entry);
        if entry[0] == 2 {
            producer.wake_sleeper();
        }
        is_pushed
    });
}

fn two_entries_arrive(
    push: impl Fn(&mut Producer<ModelWords>, Entry) -> Result<bool, BrokenRing> + Copy + Send + Sync + 'static,
) {
    model(move || {
        let words = Arc::new(ModelWords::new());
        let mut producer = Producer::new(Arc::clone(&words), SUBMISSIONS);
        let mut consumer = Consumer::new(words, SUBMISSIONS);
        let producing = thread::spawn(move || {
            for number in 1..=2 {
                let mut entry = [0; ENTRY_WORDS];
                entry[0] = number;
                assert_eq!(push(&mut producer, entry), Ok(true));
            }
        });
        let mut next = 1;
        while next <= 2 {
            let seen = consumer.wake_ups();
            match consumer.pop().unwrap() {
                Some(entry) => {
                    assert_eq!(entry[0], next);
                    next += 1;
                }
                None => consumer.wait(seen, Duration::ZERO),
            }
        }
        producing.join().unwrap();
    });
}

#[test]
fn in_every_order_an_interrupt_ends_a_wait() {
    model(|| {
        let words = Arc::new(ModelWords::new());
        let is_over = loom::sync::Arc::new(loom::sync::atomic::AtomicBool::new(false));
        let consumer = Consumer::new(Arc::clone(&words), SUBMISSIONS);
        let ending = {
            let is_over = loom::sync::Arc::clone(&is_over);
            thread::spawn(move || {
                is_over.store(true, Ordering::Release);
                Consumer::interrupt(&*words, SUBMISSIONS);
            })
        };
        // As a session does.
        loop {
            let seen = consumer.wake_ups();
            if is_over.load(Ordering::Acquire) {
                break;
            }
            consumer.wait(seen, Duration::ZERO);
        }
        ending.join().unwrap();
    });
}
