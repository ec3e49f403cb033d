//! Addresses of names.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// A host and a port.
type Name = (String, u16);

type Lookup = dyn Fn(&Name) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Asks the system for the addresses of names, each in a thread of its own and for all callers at a time.
///
/// The system's own question cannot be bounded in time or ended. A caller that waits no longer leaves its
/// thread to the next caller with the same name, so there is never more than one thread for each name, however
/// often a name is asked for that has no answer.
pub(crate) struct Resolver {
    lookup: Arc<Lookup>,
    asked: Arc<Mutex<HashMap<Name, Arc<Question>>>>,
}

/// A question that is being asked.
#[derive(Debug, Default)]
struct Question {
    answer: Mutex<Option<Answer>>,
    answered: Condvar,
}

/// Addresses, or what is wrong: an error of its own for each caller.
type Answer = Result<Vec<SocketAddr>, (io::ErrorKind, String)>;

impl Resolver {
    /// Asks the operating system.
    pub(crate) fn new() -> Self {
        Self::with(|(host, port)| (host.as_str(), *port).to_socket_addrs().map(Iterator::collect))
    }

    fn with(lookup: impl Fn(&Name) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static) -> Self {
        Self { lookup: Arc::new(lookup), asked: Arc::default() }
    }

    /// The addresses of a host, which may be an address itself.
    ///
    /// # Errors
    /// Of the system, and [`io::ErrorKind::TimedOut`] where it does not answer until the deadline.
    pub(crate) fn resolve(&self, host: &str, port: u16, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = host.parse() {
            return Ok(vec![SocketAddr::new(address, port)]);
        }
        let question = self.ask((host.to_owned(), port))?;
        let mut answer = question.answer.lock();
        while answer.is_none() {
            if question.answered.wait_until(&mut answer, deadline).timed_out() {
                break;
            }
        }
        match &*answer {
            Some(Ok(addresses)) => Ok(addresses.clone()),
            Some(Err((kind, reason))) => Err(io::Error::new(*kind, reason.clone())),
            None => Err(io::Error::new(io::ErrorKind::TimedOut, "the name was not resolved in time")),
        }
    }

    /// Joins the question for a name, or asks it.
    fn ask(&self, name: Name) -> io::Result<Arc<Question>> {
        let mut asked = self.asked.lock();
        if let Some(question) = asked.get(&name) {
            return Ok(Arc::clone(question));
        }
        let question = Arc::new(Question::default());
        let (lookup, pending) = (Arc::clone(&self.lookup), Arc::clone(&self.asked));
        let (asking, asked_name) = (Arc::clone(&question), name.clone());
        thread::Builder::new().name("kvik-resolve".to_owned()).spawn(move || {
            let answer = lookup(&asked_name).map_err(|error| (error.kind(), error.to_string()));
            // The next caller asks again: addresses change.
            pending.lock().remove(&asked_name);
            *asking.answer.lock() = Some(answer);
            asking.answered.notify_all();
        })?;
        asked.insert(name, Arc::clone(&question));
        Ok(question)
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Resolver").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(5)
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    #[test]
    fn an_address_is_not_asked_for() {
        let resolver = Resolver::with(|_| panic!("asked"));
        assert_eq!(resolver.resolve("127.0.0.1", 7, soon()).unwrap(), ["127.0.0.1:7".parse().unwrap()]);
        assert_eq!(resolver.resolve("::1", 7, soon()).unwrap(), ["[::1]:7".parse().unwrap()]);
    }

    #[test]
    fn callers_that_give_up_leave_one_thread_for_a_name() {
        let n_lookups = Arc::new(AtomicUsize::new(0));
        let (open, gate) = mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let counted = Arc::clone(&n_lookups);
        let resolver = Resolver::with(move |(_, port)| {
            counted.fetch_add(1, Ordering::SeqCst);
            let _ = gate.lock().recv();
            Ok(vec![SocketAddr::from(([10, 0, 0, 1], *port))])
        });
        for _ in 0..5 {
            let error = resolver.resolve("slow.example", 7, soon()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
        assert!(n_lookups.load(Ordering::SeqCst) <= 1);
        open.send(()).unwrap();
        open.send(()).unwrap();
        let addresses = resolver.resolve("slow.example", 7, later()).unwrap();
        assert_eq!(addresses, ["10.0.0.1:7".parse().unwrap()]);
    }

    #[test]
    fn a_name_is_asked_for_again_after_an_answer() {
        let n_lookups = AtomicUsize::new(0);
        let resolver = Resolver::with(move |_| match n_lookups.fetch_add(1, Ordering::SeqCst) {
            0 => Err(io::Error::new(io::ErrorKind::NotFound, "no such name")),
            _ => Ok(vec!["10.0.0.1:7".parse().unwrap()]),
        });
        let error = resolver.resolve("new.example", 7, later()).unwrap_err();
        assert_eq!((error.kind(), error.to_string().as_str()), (io::ErrorKind::NotFound, "no such name"));
        assert_eq!(resolver.resolve("new.example", 7, later()).unwrap().len(), 1);
    }
}
