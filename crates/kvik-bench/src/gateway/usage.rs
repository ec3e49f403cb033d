//! What threads and the process use, as the operating system counts it.

use std::fs;
use std::time::Duration;

use anyhow::Context;

/// CPU time, in user mode and in the kernel, of this process' threads named `name`.
///
/// Read from `/proc/self/task/*/schedstat`, whose first number is the time on a CPU in nanoseconds;
/// the ticks in `stat` are a thousand times coarser than what is measured. Interrupts that arrive
/// while a thread runs are in its time, so on loopback the receiving half of TCP is in the sender's.
pub(crate) fn thread_cpu_time(name: &str) -> anyhow::Result<Duration> {
    let mut total = Duration::ZERO;
    for task in fs::read_dir("/proc/self/task").context("list the threads")? {
        let path = task.context("list the threads")?.path();
        // A thread may end at any time; those that are measured live as long as their runtime.
        let Ok(comm) = fs::read_to_string(path.join("comm")) else { continue };
        if comm.trim_end() == name {
            let statistics = fs::read_to_string(path.join("schedstat")).context("read a thread's time")?;
            let on_cpu = statistics.split_whitespace().next().and_then(|number| number.parse().ok());
            total += Duration::from_nanos(on_cpu.context("read a thread's time")?);
        }
    }
    Ok(total)
}

/// Memory of this process that is in RAM, in bytes.
pub(crate) fn resident_bytes() -> anyhow::Result<u64> {
    let status = fs::read_to_string("/proc/self/status").context("read the process' memory")?;
    let kibibytes = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(kibibytes.context("read the process' memory")? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_named_threads_are_counted() {
        let busy = std::thread::Builder::new().name("busy-test".to_owned());
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let (worked_sender, worked) = std::sync::mpsc::channel::<()>();
        let thread = busy
            .spawn(move || {
                let until = std::time::Instant::now() + Duration::from_millis(50);
                while std::time::Instant::now() < until {
                    std::hint::spin_loop();
                }
                worked_sender.send(()).ok();
                receiver.recv().ok();
            })
            .unwrap();
        worked.recv().unwrap();
        assert!(Duration::ZERO < thread_cpu_time("busy-test").unwrap());
        assert_eq!(thread_cpu_time("no-such-thread").unwrap(), Duration::ZERO);
        drop(sender);
        thread.join().unwrap();
    }

    #[test]
    fn a_process_has_memory() {
        assert!(1 << 20 < resident_bytes().unwrap());
    }
}
