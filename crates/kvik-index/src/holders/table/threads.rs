//! Work that several threads share.

use parking_lot::Mutex;

/// Does all tasks, on the calling thread and on some others that end with the call; gives what came of them, in the
/// order of the tasks. Where the system has no thread to spare, fewer do the work.
pub(super) fn share_out<T: Send, R: Send>(
    tasks: Vec<T>,
    n_threads: usize,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let n_others = n_threads.min(tasks.len()).saturating_sub(1);
    let waiting = Mutex::new(tasks.into_iter().enumerate());
    let next_task = || waiting.lock().next();
    let work_on = || {
        let mut done = Vec::new();
        while let Some((number, task)) = next_task() {
            done.push((number, work(task)));
        }
        done
    };
    let mut done = std::thread::scope(|scope| {
        let spawn =
            |_| std::thread::Builder::new().name("kvik-index".to_owned()).spawn_scoped(scope, work_on).ok();
        let others: Vec<_> = (0..n_others).filter_map(spawn).collect();
        let mut done = work_on();
        for other in others {
            match other.join() {
                Ok(more) => done.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_is_done_once_and_results_are_in_the_order_of_tasks() {
        for n_threads in [0, 1, 3, 100] {
            let squares = share_out((0..50_u64).collect(), n_threads, |number| number * number);
            assert!(squares.into_iter().eq((0..50).map(|number| number * number)));
        }
        assert!(share_out(Vec::<u64>::new(), 4, |number| number).is_empty());
    }
}
