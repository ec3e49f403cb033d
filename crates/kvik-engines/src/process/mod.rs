//! Processes of engines: started in a group of their own, watched through the kernel, ended with all that they started.
//!
//! A process outlives the controller, which may find it again by [`ProcessId`]. All that is done to it goes through a
//! descriptor of the process, so a number that the system has given to another process is never hit.

pub(crate) mod log_file;
mod table;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio_util::sync::CancellationToken;

use table::find_mark;
pub(crate) use table::find_marked;

/// The variable that marks the processes of a controller; its value is the state folder and the engine's name.
pub(crate) const MARK: &str = "KVIK_ENGINE_OF";

/// Time in which a killed process is gone, unless the kernel holds it.
const KILL_TIME: Duration = Duration::from_secs(10);

/// One process among all that the machine has had since it started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProcessId {
    pub(crate) pid: i32,
    /// When it began, in ticks of the kernel's clock.
    start_ticks: u64,
    /// The life of the machine that the ticks are of.
    boot_id: String,
}

/// What to start.
#[derive(Debug)]
pub(crate) struct Start<'a> {
    pub(crate) command: &'a [String],
    pub(crate) env: &'a [(String, String)],
    /// Takes all that it writes.
    pub(crate) log: File,
}

/// A process that is watched; it goes on when this is dropped.
#[derive(Debug)]
pub(crate) struct Process {
    id: ProcessId,
    leader: Pid,
    handle: AsyncFd<OwnedFd>,
    /// `None` for one that another controller has started.
    child: Option<Child>,
}

impl ProcessId {
    /// Whether the process lives.
    pub(crate) fn is_alive(&self) -> bool {
        table::boot_id().is_some_and(|boot_id| boot_id == self.boot_id)
            && table::stat(self.pid)
                .is_some_and(|stat| stat.start_ticks == self.start_ticks && !stat.is_zombie)
    }
}

impl Process {
    /// Starts a process in a group of its own, so that signals of the controller's terminal do not reach it.
    ///
    /// # Errors
    /// If the program cannot be started, for instance because there is none of that name.
    pub(crate) fn start(start: Start<'_>) -> io::Result<Self> {
        let [program, arguments @ ..] = start.command else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the command is empty"));
        };
        let mut command = Command::new(OsStr::new(program));
        command
            .args(arguments)
            .envs(start.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(start.log.try_clone()?)
            .stderr(start.log)
            .process_group(0);
        let mut child = command.spawn()?;
        match Self::watch(child.id() as i32) {
            Ok((id, leader, handle)) => Ok(Self { id, leader, handle, child: Some(child) }),
            Err(error) => {
                // A process that cannot be watched is none that can be kept.
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Finds a process of an earlier controller; `None` if it has ended.
    pub(crate) fn find(id: &ProcessId) -> Option<Self> {
        let (found, leader, handle) = Self::watch(id.pid).ok()?;
        // Looked at after the descriptor is there, which names one process for good.
        (found == *id && id.is_alive()).then_some(Self { id: found, leader, handle, child: None })
    }

    /// Watches a process that carries the mark of a controller.
    pub(crate) fn find_by_pid(pid: i32) -> Option<Self> {
        let (id, leader, handle) = Self::watch(pid).ok()?;
        id.is_alive().then_some(Self { id, leader, handle, child: None })
    }

    fn watch(pid: i32) -> io::Result<(ProcessId, Pid, AsyncFd<OwnedFd>)> {
        let gone = || io::Error::new(io::ErrorKind::NotFound, "the process has ended");
        let leader = Pid::from_raw(pid).ok_or_else(gone)?;
        let handle = pidfd_open(leader, PidfdFlags::empty())?;
        #[expect(
            deprecated,
            reason = "unsound only for types whose descriptor changes; an owned one never does, and the other call is unsafe"
        )]
        let handle = AsyncFd::with_interest(handle, Interest::READABLE)?;
        let stat = table::stat(pid).ok_or_else(gone)?;
        let boot_id = table::boot_id().ok_or_else(gone)?;
        Ok((ProcessId { pid, start_ticks: stat.start_ticks, boot_id }, leader, handle))
    }

    pub(crate) fn id(&self) -> &ProcessId {
        &self.id
    }

    /// Waits until it has ended. Cancel safe.
    pub(crate) async fn ended(&self) {
        // The descriptor stays readable. An error means that it cannot be waited for: then it counts as ended, and is killed.
        let _ = self.handle.readable().await;
    }

    /// Asks it to end, and kills it and all that it started after `grace` or when `hurry` says so. Says how it ended.
    pub(crate) async fn stop(mut self, grace: Duration, hurry: &CancellationToken) -> String {
        // An error means that it has ended.
        let _ = pidfd_send_signal(self.handle.get_ref(), Signal::TERM);
        tokio::select! {
            () = self.ended() => {}
            () = tokio::time::sleep(grace) => self.kill_group(),
            () = hurry.cancelled() => self.kill_group(),
        }
        // Only a process that the kernel holds is left after this.
        let _ = tokio::time::timeout(KILL_TIME, self.ended()).await;
        self.finish()
    }

    /// Kills what is left of its group after its end, and says how it ended.
    pub(crate) fn finish(&mut self) -> String {
        // Before the child is waited for: until then its number belongs to no other process.
        self.kill_group();
        let Some(child) = &mut self.child else { return "ended".to_owned() };
        match child.try_wait() {
            Ok(Some(status)) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("ended with exit code {code}"),
                (None, Some(signal)) => format!("was ended by signal {signal}"),
                (None, None) => "ended".to_owned(),
            },
            Ok(None) => "does not end".to_owned(),
            Err(error) => format!("ended ({error})"),
        }
    }

    fn kill_group(&self) {
        let is_another = self.child.is_none()
            && table::stat(self.id.pid).is_some_and(|stat| stat.start_ticks != self.id.start_ticks);
        if !is_another {
            // An error means that there is none left.
            let _ = kill_process_group(self.leader, Signal::KILL);
        }
    }
}

/// Kills all processes with this very mark.
pub(crate) fn kill_marked(mark: &str) {
    for (pid, _) in find_marked(mark).into_iter().filter(|(_, rest)| rest.is_empty()) {
        let handle = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        // Looked at again after the descriptor is there, which names one process for good.
        let is_marked = find_mark(pid, mark).is_some_and(|rest| rest.is_empty());
        if let Some(handle) = handle.filter(|_| is_marked) {
            // An error means that it has ended.
            let _ = pidfd_send_signal(&handle, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(script: &str, env: &[(String, String)]) -> (Process, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let log = File::create(folder.path().join("log")).unwrap();
        let command = ["sh", "-c", script].map(str::to_owned);
        (Process::start(Start { command: &command, env, log }).unwrap(), folder)
    }

    #[tokio::test]
    async fn the_end_of_a_process_is_seen_with_its_code() {
        let (mut process, _folder) = start("exit 7", &[]);
        process.ended().await;
        assert_eq!(process.finish(), "ended with exit code 7");
        assert!(!process.id().is_alive());
    }

    #[tokio::test]
    async fn a_process_is_stopped_with_all_that_it_started() {
        let (process, folder) = start("sh -c 'echo $$; exec tail -f /dev/null' & wait", &[]);
        let log = folder.path().join("log");
        let inner: i32 = loop {
            let text = std::fs::read_to_string(&log).unwrap();
            if let Some(line) = text.lines().next() {
                break line.parse().unwrap();
            }
            tokio::task::yield_now().await;
        };
        assert!(table::stat(inner).is_some());
        let id = process.id().clone();
        assert!(id.is_alive());
        assert_eq!(
            process.stop(Duration::from_secs(20), &CancellationToken::new()).await,
            "was ended by signal 15"
        );
        assert!(!id.is_alive());
        while table::stat(inner).is_some_and(|stat| !stat.is_zombie) {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_process_that_does_not_want_to_end_is_killed() {
        let (process, folder) = start("trap '' TERM; echo armed; while :; do read x < /dev/zero; done", &[]);
        while std::fs::read_to_string(folder.path().join("log")).unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
        assert_eq!(
            process.stop(Duration::from_millis(20), &CancellationToken::new()).await,
            "was ended by signal 9"
        );
    }

    #[tokio::test]
    async fn a_process_is_found_by_its_id_and_its_mark_and_by_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = format!("{} ", folder.path().display());
        let mark = (MARK.to_owned(), format!("{prefix}a"));
        let (process, _log) = start("exec tail -f /dev/null", &[mark]);
        let id = process.id().clone();
        assert!(Process::find(&id).is_some());
        let other = ProcessId { start_ticks: id.start_ticks + 1, ..id.clone() };
        assert!(Process::find(&other).is_none());
        let other = ProcessId { boot_id: "another".to_owned(), ..id.clone() };
        assert!(Process::find(&other).is_none());
        // A process has no environment for the moment in which it becomes another program.
        while find_marked(&prefix) != [(id.pid, "a".to_owned())] {
            tokio::task::yield_now().await;
        }
        assert!(find_marked(&format!("{prefix}b")).is_empty());
        kill_marked(&prefix);
        assert!(id.is_alive());
        process.stop(Duration::from_secs(20), &CancellationToken::new()).await;
        assert!(Process::find(&id).is_none());
    }

    #[test]
    fn a_program_that_does_not_exist_is_an_error() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _entered = runtime.enter();
        let folder = tempfile::tempdir().unwrap();
        let log = File::create(folder.path().join("log")).unwrap();
        let command = ["/no/such/program".to_owned()];
        let error = Process::start(Start { command: &command, env: &[], log }).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
