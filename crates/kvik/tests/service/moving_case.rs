//! One disturbed move: a request goes from one worker to another, and at one step of the way something happens to one of
//! the processes.
//!
//! Three workers, a gateway and a coordinator, each behind a proxy of its own, so that every call of the protocol is seen
//! and can be held up. What a client gets must be what an undisturbed run gives; where its gateway is gone, the start of it.

#![allow(dead_code, reason = "each suite has some of the cases")]

use std::io;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cluster::{Client, Role, start, start_coordinator, start_gateway};
use crate::fault_proxy::{Direction, FaultProxy, Held, Pattern, Watched};
use crate::http;
use crate::streams::{by_output, normalized, open, requests, undisturbed};

/// How long a process is stopped or cut off: the gateway notices it.
const FAULT_TIME: Duration = Duration::from_millis(1500);
/// Longest time for everything to be given back: more than that after which a ticket is given up.
const REST_PATIENCE: Duration = Duration::from_secs(75);
/// Events of a client before its request moves: each output has a full block by then, so that blocks are sent.
const FIRST_EVENTS: usize = 100;
/// Passes the whole pattern and what came with it.
const ALL: usize = 1 << 30;

/// Why the request moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Its worker is asked to move it.
    Move,
    /// Its worker drains after `POST /drain`; the gateway chooses the destination.
    Drain,
    /// Its worker drains after SIGTERM.
    Terminate,
}

/// What something happens to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Victim {
    Source,
    Destination,
    Gateway,
    Coordinator,
}

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// As kill -9 does.
    Kill,
    /// As SIGSTOP does, and SIGCONT later.
    Stop,
    /// Its connections end and it takes no new ones, for a while.
    Cut,
}

/// When it happens, in the order of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Running,
    OfferSent,
    OfferAnswered,
    /// The n-th call with blocks; a request of one output may have only one.
    BlocksSent(usize),
    BlocksAnswered,
    NoticeSent,
    /// The first bytes of what follows the notice have come, and no more.
    NoticeAndHalfALine,
    ResumeSent,
    ResumedStreamBegins,
    ResumedStreamGoesOn,
    /// The destination was killed when the request was to go on there.
    ThawSent,
    ThawAnswered,
}

pub(crate) const VICTIMS: [Victim; 4] =
    [Victim::Source, Victim::Destination, Victim::Gateway, Victim::Coordinator];
pub(crate) const FAULTS: [Fault; 3] = [Fault::Kill, Fault::Stop, Fault::Cut];
pub(crate) const STEPS: [Step; 13] = [
    Step::Running,
    Step::OfferSent,
    Step::OfferAnswered,
    Step::BlocksSent(1),
    Step::BlocksSent(2),
    Step::BlocksAnswered,
    Step::NoticeSent,
    Step::NoticeAndHalfALine,
    Step::ResumeSent,
    Step::ResumedStreamBegins,
    Step::ResumedStreamGoesOn,
    Step::ThawSent,
    Step::ThawAnswered,
];

/// The processes of one move.
#[derive(Debug)]
struct Stage {
    coordinator: Proxied,
    gateway: Proxied,
    workers: Vec<Proxied>,
    /// Of the workers. Of a worker that drains, the destination is one of the others until a step shows which.
    source: usize,
    destination: usize,
    /// Whether the gateway chooses the destination.
    is_chosen_by_gateway: bool,
}

/// A process and the proxy before it.
#[derive(Debug)]
struct Proxied {
    role: Role,
    proxy: FaultProxy,
    is_killed: bool,
}

/// How often the gateway has let the answer go on, and how.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Continued {
    pub(crate) moved: f64,
    pub(crate) replayed: f64,
    pub(crate) stayed: f64,
}

/// What a client has got, and why no more.
type Received = (Vec<String>, io::Result<()>);

/// Has the request `number` of [`long_requests`] moved and does `fault` to `victim` at `step`; how the answer has gone on.
#[track_caller]
pub(crate) fn disturb(cause: Cause, victim: Victim, fault: Fault, step: Step, number: usize) -> Continued {
    let name = format!("{cause:?}-{victim:?}-{fault:?}-{step:?}-{number}");
    let mut stage = Stage::start();
    let expected = &expected(&stage)[number];
    let client = stage.client();
    let mut stream = open(&client, &long_requests()[number], None, &name);
    stage.choose(&stream.worker());
    stage.is_chosen_by_gateway = cause != Cause::Move;
    let mut events: Vec<String> = (0..FIRST_EVENTS).map(|_| stream.event().unwrap().unwrap()).collect();

    let (places, pattern) = stage.place_of(step);
    let watched = pattern.map(|pattern| stage.watch(&places, pattern));
    // The destination is gone when the request should go on there: only then it is thawed.
    let resuming = matches!(step, Step::ThawSent | Step::ThawAnswered)
        .then(|| stage.watch(&stage.destinations(), to_role("POST /sequences/resume", 1)));
    let (source, to) = (stage.source_client(), stage.destination_base());
    let (received, ()) = thread::scope(|scope| {
        let reading = scope.spawn(move || -> Received {
            loop {
                match stream.event() {
                    Ok(Some(event)) => events.push(event),
                    Ok(None) => return (events, Ok(())),
                    Err(error) => return (events, Err(error)),
                }
            }
        });
        let moving = (cause == Cause::Move).then(|| scope.spawn(move || ask_to_move(&source, &to)));
        stage.drain_source(cause);
        let mut ended = None;
        if let Some(resuming) = resuming {
            let held = resuming.wait().unwrap_or_else(|| panic!("{name}: the request does not go on"));
            stage.destination = stage.destinations()[held.place];
            ended = Some(Victim::Destination);
            stage.begin(Victim::Destination, Fault::Kill);
            drop(held);
        }
        let held: Option<Held> = watched.map(|watched| {
            watched.wait().unwrap_or_else(|| panic!("{name}: the step does not come; {ended:?}"))
        });
        if let Some(held) = held.as_ref().filter(|_| 1 < places.len()) {
            stage.destination = places[held.place];
        }
        if ended != Some(victim) {
            stage.begin(victim, fault);
        }
        drop(held);
        if fault != Fault::Kill && ended != Some(victim) {
            stage.serve_for(FAULT_TIME);
            stage.end(victim, fault);
        }
        if let Some(moving) = moving {
            moving.join().unwrap();
        }
        (reading.join().unwrap(), ())
    });
    check(&name, received, expected, victim == Victim::Gateway && fault != Fault::Stop);
    let continued =
        |outcome: &str| stage.gateway.role.metric("kvik_gateway_continued_total", outcome).unwrap_or(0.0);
    let [moved, replayed, stayed] = ["moved", "replayed", "stayed"].map(continued);
    if cause != Cause::Move {
        stage.wait_for_source(&name);
    }
    stage.wait_for_rest(&name);
    Continued { moved, replayed, stayed }
}

/// Requests that still run when all steps of a move are done, however busy the machine is.
fn long_requests() -> Vec<(&'static str, Value)> {
    let mut requests = requests();
    for (_, body) in &mut requests {
        body["max_tokens"] = (3 * body["max_tokens"].as_u64().unwrap()).into();
    }
    requests
}

/// Asks the source to move its only request; what it answers depends on the fault.
fn ask_to_move(source: &Client, to: &str) {
    let running = http::get_json(&source.address, "/sequences");
    let id = running.and_then(|running| Some(running["sequences"][0]["id"].as_str()?.to_owned()));
    if let Some(id) = id {
        let path = format!("/sequences/{id}/move");
        let _ = http::send(&source.address, "POST", &path, Some(&json!({"to": to})));
    }
}

/// The events of all requests in an undisturbed run, which all runs of the same build give.
fn expected(stage: &Stage) -> &'static [Vec<(Value, Value)>] {
    static EXPECTED: OnceLock<Vec<Vec<(Value, Value)>>> = OnceLock::new();
    EXPECTED.get_or_init(|| undisturbed(&stage.gateway.role.client, &long_requests(), None))
}

/// Compares what a client has got with what it should have; `may_break` if its gateway was gone.
#[track_caller]
fn check(name: &str, (events, ending): Received, expected: &[(Value, Value)], may_break: bool) {
    let events = by_output(normalized(events));
    if !may_break {
        assert!(ending.is_ok(), "{name}: {ending:?} after {} events", events.len());
        for (event, expected) in events.iter().zip(expected) {
            assert_eq!(event, expected, "{name}");
        }
        assert_eq!(events.len(), expected.len(), "{name}");
        return;
    }
    let of = |events: &[(Value, Value)], output: &Value| -> Vec<Value> {
        events.iter().filter(|(other, _)| other == output).map(|(_, event)| event.clone()).collect()
    };
    for (output, _) in &events {
        let (got, whole) = (of(&events, output), of(expected, output));
        assert!(whole.starts_with(&got), "{name}: output {output} is not the start of the undisturbed one");
    }
}

fn to_role(bytes: &'static str, nth: usize) -> Pattern {
    Pattern { direction: Direction::ToRole, bytes, nth, n_passed: 0 }
}

fn from_role(bytes: &'static str, nth: usize) -> Pattern {
    Pattern { direction: Direction::FromRole, bytes, nth, n_passed: 0 }
}

impl Proxied {
    fn new(proxy: FaultProxy, role: Role) -> Self {
        proxy.set_upstream(&role.address);
        Self { role, proxy, is_killed: false }
    }

    fn base(&self) -> String {
        format!("http://{}", self.proxy.address)
    }
}

impl Stage {
    #[track_caller]
    fn start() -> Self {
        let coordinator = Proxied::new(FaultProxy::start(), start_coordinator("127.0.0.1:0", &[]));
        let worker = |id: &str| {
            let proxy = FaultProxy::start();
            let advertise = format!("http://{}", proxy.address);
            let base = coordinator.base();
            let flags =
                ["--id", id, "--threads", "1", "--coordinator", base.as_str(), "--advertise", &advertise];
            Proxied::new(proxy, start("worker", "127.0.0.1:0", &flags, &[]))
        };
        let workers = ["worker-0", "worker-1", "worker-2"].map(worker).into_iter().collect();
        let gateway = start_gateway("127.0.0.1:0", &[&coordinator.proxy.address], &[]);
        gateway.wait_for_backends(3);
        let gateway = Proxied::new(FaultProxy::start(), gateway);
        Self { coordinator, gateway, workers, source: 0, destination: 1, is_chosen_by_gateway: false }
    }

    /// What the client talks to.
    fn client(&self) -> Client {
        Client { address: self.gateway.proxy.address.clone() }
    }

    /// The source is the worker that runs the request, the destination the next one.
    fn choose(&mut self, source: &str) {
        let number = source.strip_prefix("worker-").and_then(|number| number.parse().ok());
        self.source = number.unwrap_or_else(|| panic!("no worker: {source}"));
        self.destination = (self.source + 1) % self.workers.len();
    }

    /// The source itself, whatever its proxy does.
    fn source_client(&self) -> Client {
        self.workers[self.source].role.client.clone()
    }

    fn destination_base(&self) -> String {
        self.workers[self.destination].base()
    }

    /// The workers that the request may go to.
    fn destinations(&self) -> Vec<usize> {
        let others = (0..self.workers.len()).filter(|place| *place != self.source);
        if self.is_chosen_by_gateway { others.collect() } else { vec![self.destination] }
    }

    /// The workers at which a step may be seen, and the bytes by which it is known; no bytes if it is now.
    fn place_of(&self, step: Step) -> (Vec<usize>, Option<Pattern>) {
        let (source, destinations) = (vec![self.source], self.destinations());
        let (places, pattern) = match step {
            Step::Running => return (source, None),
            Step::OfferSent => (destinations, to_role("POST /sequences/moves", 1)),
            Step::OfferAnswered => (destinations, from_role("\"have_blocks\":[", 1)),
            Step::BlocksSent(nth) => (destinations, to_role("PUT /sequences/moves/", nth)),
            Step::BlocksAnswered => (destinations, from_role("\"is_full\"", 1)),
            Step::NoticeSent => (source, from_role(":kvik-move", 1)),
            Step::NoticeAndHalfALine => {
                // A notice is written in one piece, with the line that covers it behind it.
                (source, Pattern { n_passed: 7, ..from_role("\n\n:kvik \n\n", 1) })
            }
            Step::ResumeSent => (destinations, to_role("POST /sequences/resume", 1)),
            Step::ResumedStreamBegins => (destinations, from_role(":kvik-head", 1)),
            Step::ResumedStreamGoesOn => (destinations, Pattern { n_passed: ALL, ..from_role("data: ", 5) }),
            Step::ThawSent => (source, to_role("/thaw HTTP/1.1", 1)),
            Step::ThawAnswered => (source, from_role("{\"id\":\"seq-", 1)),
        };
        (places, Some(pattern))
    }

    fn watch(&self, places: &[usize], pattern: Pattern) -> Watched {
        let proxies: Vec<&FaultProxy> = places.iter().map(|place| &self.workers[*place].proxy).collect();
        FaultProxy::watch(&proxies, pattern)
    }

    /// Begins to drain the source, if that is the cause.
    #[track_caller]
    fn drain_source(&self, cause: Cause) {
        let source = &self.workers[self.source].role;
        match cause {
            Cause::Move => {}
            Cause::Drain => {
                let answer = http::send(&source.address, "POST", "/drain", None).unwrap();
                assert_eq!(answer.status, 202);
            }
            Cause::Terminate => source.process.signal("TERM"),
        }
    }

    /// Waits until a source that drains has ended.
    #[track_caller]
    fn wait_for_source(&mut self, name: &str) {
        let source = &mut self.workers[self.source];
        if !source.is_killed {
            let status = source.role.process.ended();
            assert_eq!(status.code(), Some(0), "{name}");
            source.is_killed = true;
        }
    }

    fn victim(&mut self, victim: Victim) -> &mut Proxied {
        match victim {
            Victim::Source => &mut self.workers[self.source],
            Victim::Destination => &mut self.workers[self.destination],
            Victim::Gateway => &mut self.gateway,
            Victim::Coordinator => &mut self.coordinator,
        }
    }

    fn begin(&mut self, victim: Victim, fault: Fault) {
        let victim = self.victim(victim);
        match fault {
            Fault::Kill => {
                victim.role.process.kill();
                victim.is_killed = true;
            }
            Fault::Stop => victim.role.process.signal("STOP"),
            Fault::Cut => victim.proxy.set_cut(true),
        }
    }

    fn end(&mut self, victim: Victim, fault: Fault) {
        let victim = self.victim(victim);
        match fault {
            Fault::Kill => {}
            Fault::Stop => victim.role.process.signal("CONT"),
            Fault::Cut => victim.proxy.set_cut(false),
        }
    }

    /// Asks the worker that has no part in the move, again and again, until a fault has lasted for `time`.
    #[track_caller]
    fn serve_for(&self, time: Duration) {
        let mut others =
            (0..self.workers.len()).filter(|place| ![self.source, self.destination].contains(place));
        let bystander = &self.workers[others.next().unwrap()].role;
        let until = Instant::now() + time;
        while Instant::now() < until {
            assert_eq!(http::get(&bystander.address, "/health").unwrap().0, 200);
        }
    }

    /// Waits until nothing runs, no block is held and no load is counted in any process that lives.
    #[track_caller]
    fn wait_for_rest(&self, name: &str) {
        let until = Instant::now() + REST_PATIENCE;
        while let Err(rest) = self.is_at_rest() {
            assert!(Instant::now() < until, "{name}: not given back: {rest}");
            thread::yield_now();
        }
    }

    fn is_at_rest(&self) -> Result<(), String> {
        let gateway = &self.gateway;
        for metric in ["kvik_gateway_outstanding_tokens", "kvik_gateway_outstanding_requests"] {
            let value = if gateway.is_killed { Some(0.0) } else { gateway.role.metric(metric, "") };
            if 0.5 < value.unwrap_or(0.0) {
                return Err(format!("{metric} {value:?}"));
            }
        }
        for worker in self.workers.iter().filter(|worker| !worker.is_killed) {
            let address = &worker.role.address;
            let stats = http::get_json(address, "/kv/stats").ok_or("no stats")?;
            let running = http::get_json(address, "/sequences").ok_or("no list")?;
            let waiting = worker.role.metric("vllm:num_requests_waiting", "").unwrap_or(0.0);
            let is_idle = stats["running_sequences"] == 0 && stats["waiting_sequences"] == 0 && waiting < 0.5;
            let is_empty = running["sequences"].as_array().is_some_and(Vec::is_empty);
            if !is_idle || !is_empty || stats["free_blocks"] != stats["blocks"] {
                return Err(format!("{address}: {stats} {running}"));
            }
        }
        Ok(())
    }
}
