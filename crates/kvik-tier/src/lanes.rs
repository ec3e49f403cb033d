//! Requests over several connections at a time: how they are divided, and threads that send them.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crate::key::ChunkKey;

/// A fixed number of threads, which are started when they are first needed; dropping it joins them.
///
/// Work never waits for a thread: what finds none idle is done by the caller. So a server that does not answer holds up
/// those that ask it, and no others.
#[derive(Debug)]
pub(crate) struct LaneThreads {
    /// What the threads are called.
    name: &'static str,
    n_threads: usize,
    n_idle: AtomicUsize,
    started: OnceLock<Option<Started>>,
}

#[derive(Debug)]
struct Started {
    /// Gone only while it is dropped.
    pool: Option<rayon::ThreadPool>,
    threads: Vec<JoinHandle<()>>,
}

/// An idle thread that is meant for a piece of work; it is idle again when this is dropped.
struct Claim<'a>(&'a AtomicUsize);

/// Divides requests into so many lanes of about the same bytes. Equal keys stay in one lane, in their order.
pub(crate) fn split<T>(
    requests: impl IntoIterator<Item = T>,
    n_lanes: usize,
    key_and_bytes: impl Fn(&T) -> (ChunkKey, usize),
) -> Vec<Vec<T>> {
    if n_lanes < 2 {
        return vec![requests.into_iter().collect()];
    }
    let mut lanes: Vec<(usize, Vec<T>)> = (0..n_lanes).map(|_| (0, Vec::new())).collect();
    let mut lane_of_key: HashMap<ChunkKey, usize> = HashMap::new();
    for request in requests {
        let (key, n_bytes) = key_and_bytes(&request);
        let least_loaded = || (0..n_lanes).min_by_key(|lane_idx| lanes[*lane_idx].0).unwrap_or_default();
        let lane_idx = *lane_of_key.entry(key).or_insert_with(least_loaded);
        let (lane_bytes, lane) = &mut lanes[lane_idx];
        *lane_bytes += n_bytes;
        lane.push(request);
    }
    lanes.into_iter().map(|(_, lane)| lane).filter(|lane| !lane.is_empty()).collect()
}

impl LaneThreads {
    /// At most so many threads of that name.
    pub(crate) fn new(name: &'static str, n_threads: usize) -> Self {
        Self { name, n_threads, n_idle: AtomicUsize::new(n_threads), started: OnceLock::new() }
    }

    /// Calls `run` once with each item, several at a time as far as threads are idle; the first ones first.
    pub(crate) fn run_all<T: Send>(&self, items: &mut [T], run: impl Fn(&mut T) + Sync) {
        let Some((own, others)) = items.split_first_mut() else { return };
        let pool = if others.is_empty() { None } else { self.pool() };
        let Some(pool) = pool else {
            for item in std::iter::once(own).chain(others) {
                run(item);
            }
            return;
        };
        let run = &run;
        pool.in_place_scope(|scope| {
            let mut left = Vec::new();
            for item in others {
                match self.claim() {
                    Some(claim) => scope.spawn(move |_| {
                        let _claim = claim;
                        run(item);
                    }),
                    None => left.push(item),
                }
            }
            for item in std::iter::once(own).chain(left) {
                run(item);
            }
        });
    }

    /// The threads; `None` where the operating system gives none.
    fn pool(&self) -> Option<&rayon::ThreadPool> {
        self.started.get_or_init(|| Started::start(self.name, self.n_threads)).as_ref()?.pool.as_ref()
    }

    fn claim(&self) -> Option<Claim<'_>> {
        // Relaxed: the number bounds what is begun, and orders nothing.
        let claimed =
            self.n_idle.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n_idle| n_idle.checked_sub(1));
        claimed.is_ok().then(|| Claim(&self.n_idle))
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Relaxed: as above.
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Started {
    fn start(name: &str, n_threads: usize) -> Option<Self> {
        let mut threads = Vec::with_capacity(n_threads);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(n_threads)
            .spawn_handler(|thread| {
                let builder = std::thread::Builder::new().name(name.to_owned());
                threads.push(builder.spawn(|| thread.run())?);
                Ok(())
            })
            .build();
        match pool {
            Ok(pool) => Some(Self { pool: Some(pool), threads }),
            Err(error) => {
                tracing::warn!(%error, threads = name, "requests go over one connection at a time");
                // Those that were started have been told to end.
                for thread in threads {
                    let _ = thread.join();
                }
                None
            }
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // Tells the threads to end.
        self.pool = None;
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;
    use std::sync::Barrier;
    use std::thread::ThreadId;

    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn every_item_is_done_once_by_a_few_threads_that_are_used_again() {
        let lanes = LaneThreads::new("lanes", 3);
        let threads: Mutex<HashSet<ThreadId>> = Mutex::default();
        for _ in 0..200 {
            let mut items = [0_u32; 7];
            lanes.run_all(&mut items, |item| {
                *item += 1;
                threads.lock().insert(std::thread::current().id());
            });
            assert_eq!(items, [1; 7]);
        }
        assert!(threads.lock().len() <= 4, "three and the caller");
        assert_eq!(lanes.n_idle.load(Ordering::Relaxed), 3);
        lanes.run_all(&mut [0_u32; 0], |_| unreachable!());
    }

    #[test]
    fn items_are_done_at_a_time() {
        let lanes = LaneThreads::new("lanes", 3);
        let meeting = Barrier::new(4);
        // It would never end if fewer threads did them.
        lanes.run_all(&mut [(); 4], |()| {
            meeting.wait();
        });
    }

    #[test]
    fn a_caller_does_its_own_work_while_all_threads_are_held_up_by_another() {
        let lanes = Arc::new(LaneThreads::new("lanes", 2));
        let (begun, may_end) = (Arc::new(Barrier::new(4)), Arc::new(Barrier::new(4)));
        let holding = std::thread::spawn({
            let (lanes, begun, may_end) = (Arc::clone(&lanes), Arc::clone(&begun), Arc::clone(&may_end));
            move || {
                lanes.run_all(&mut [(); 3], |()| {
                    begun.wait();
                    may_end.wait();
                });
            }
        });
        begun.wait();
        let mut items = [0_u32; 5];
        lanes.run_all(&mut items, |item| *item += 1);
        assert_eq!(items, [1; 5]);
        may_end.wait();
        holding.join().unwrap();
    }

    #[test]
    fn dropping_it_joins_its_threads() {
        let alive = Arc::new(());
        let lanes = LaneThreads::new("lanes", 2);
        thread_local! {
            static HELD: Mutex<Option<Arc<()>>> = const { Mutex::new(None) };
        }
        let meeting = Barrier::new(3);
        lanes.run_all(&mut [(); 3], |()| {
            meeting.wait();
            HELD.with(|held| *held.lock() = Some(Arc::clone(&alive)));
        });
        HELD.with(|held| *held.lock() = None);
        drop(lanes);
        assert_eq!(Arc::strong_count(&alive), 1, "a thread that has ended has dropped what it held");
    }
}
