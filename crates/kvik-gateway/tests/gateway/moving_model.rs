//! All ways that the moving of one request can go, over a model of the protocol of docs/moving.md.
//!
//! The model has the parties and the calls of the protocol under the names that they have in the code: a gateway with its
//! journal, two workers with the runs of the request, the calls between them. Calls are lost, doubled and overtake each other; streams
//! break off; workers and the gateway die, at any point. The search visits every state that can be reached, and asks of each:
//!
//! * the gateway holds one stream;
//! * every line that the gateway reads is the next one of its journal: no token twice, no hole;
//! * where nothing goes on by itself, nothing is held: no run, no arrival;
//! * a gateway that lives has then given the whole answer, or an error because no worker is left or it has gone on too often;
//! * nothing goes round in a circle, so that every state comes to such an end.

use std::collections::HashMap;

/// Tokens of the answer.
const N_TOKENS: u8 = 2;
/// `retry.max_continuations`.
const MAX_CONTINUATIONS: u8 = 2;
/// How much may happen in one history, at most.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Moves that something asks for: a gateway, or an operator.
    pub(crate) moves: u8,
    /// Calls and answers that are lost, processes that die, connections that break.
    pub(crate) faults: u8,
    /// Calls that come twice.
    pub(crate) doubled_calls: u8,
}

type WorkerId = u8;
const N_WORKERS: u8 = 2;

/// A line of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Line {
    /// A token, by its number; the last one is also the end.
    Progress(u8),
    /// The request is frozen.
    Move { ticket: u8, to: WorkerId },
}

/// How far a move has come at its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Moving {
    No,
    /// The offer is on its way.
    Offering {
        ticket: u8,
        to: WorkerId,
    },
    /// Blocks are.
    Copying {
        ticket: u8,
        to: WorkerId,
    },
}

/// The request, where it runs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Run {
    /// `JournalHead::sequence`.
    sequence: u8,
    worker: WorkerId,
    /// The token that it chooses next.
    next: u8,
    is_frozen: bool,
    moving: Moving,
    /// Lines that the gateway has not read.
    stream: Vec<Line>,
    /// Whether the gateway holds the stream.
    is_read: bool,
}

/// A call on its way, or its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Call {
    BeginMove { sequence: u8, to: WorkerId },
    Offer { sequence: u8, ticket: u8, to: WorkerId },
    PutBlocks { sequence: u8, ticket: u8, to: WorkerId },
    Forget { ticket: u8, to: WorkerId },
    Resume { number: u8, to: WorkerId, from: u8, ticket: Option<u8> },
    Thaw { number: u8, sequence: u8 },
}

/// What the gateway does for the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Gateway {
    Reading {
        sequence: u8,
    },
    /// Waits for the answer to the call `number`.
    Following {
        number: u8,
        source: u8,
    },
    Thawing {
        number: u8,
        source: u8,
    },
    Replaying {
        number: u8,
        to: WorkerId,
        failed: Option<WorkerId>,
    },
    /// Looks for a worker.
    Placing {
        failed: Option<WorkerId>,
    },
    Done,
    Failed,
    Dead,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    is_alive: [bool; N_WORKERS as usize],
    /// Tickets, by worker.
    arrivals: [Vec<u8>; N_WORKERS as usize],
    runs: Vec<Run>,
    calls: Vec<Call>,
    gateway: Gateway,
    /// Tokens that the client has.
    journal: u8,
    n_continued: u8,
    n_sequences: u8,
    n_tickets: u8,
    n_calls: u8,
    n_doubled: u8,
    n_faults: u8,
    n_moves: u8,
}

impl State {
    fn start() -> Self {
        let mut state = Self {
            is_alive: [true; 2],
            arrivals: [Vec::new(), Vec::new()],
            runs: Vec::new(),
            calls: Vec::new(),
            gateway: Gateway::Reading { sequence: 0 },
            journal: 0,
            n_continued: 0,
            n_sequences: 0,
            n_tickets: 0,
            n_calls: 0,
            n_doubled: 0,
            n_faults: 0,
            n_moves: 0,
        };
        state.begin_run(0, 0, true);
        state
    }

    fn begin_run(&mut self, worker: WorkerId, next: u8, is_read: bool) -> u8 {
        let sequence = self.n_sequences;
        self.n_sequences += 1;
        let (stream, moving) = (Vec::new(), Moving::No);
        self.runs.push(Run { sequence, worker, next, is_frozen: false, moving, stream, is_read });
        sequence
    }

    fn run(&mut self, sequence: u8) -> Option<&mut Run> {
        self.runs.iter_mut().find(|run| run.sequence == sequence)
    }

    fn call(&mut self, call: Call) {
        self.calls.push(call);
        self.calls.sort_unstable();
    }

    fn next_call(&mut self) -> u8 {
        self.n_calls += 1;
        self.n_calls
    }

    /// Lets go of all streams but that of `kept`.
    fn drop_streams(&mut self, kept: Option<u8>) {
        for run in &mut self.runs {
            if Some(run.sequence) != kept {
                run.is_read = false;
                run.stream.clear();
            }
        }
    }

    /// The gateway's stream has broken off, or it gives up a frozen request: as `Continuation::replay`.
    fn replay(&mut self, failed: Option<WorkerId>, counts: bool) {
        self.drop_streams(None);
        if counts && MAX_CONTINUATIONS <= self.n_continued {
            self.gateway = Gateway::Failed;
            return;
        }
        self.n_continued += u8::from(counts);
        self.gateway = Gateway::Placing { failed };
    }

    /// What happens without a fault.
    fn progress(&self) -> Vec<Self> {
        let mut after = Vec::new();
        for idx in 0..self.runs.len() {
            self.run_goes_on(idx, &mut after);
        }
        self.gateway_goes_on(&mut after);
        for idx in 0..self.calls.len() {
            let mut state = self.clone();
            let call = state.calls.remove(idx);
            state.deliver(call);
            after.push(state);
        }
        // A ticket that nothing is heard of; nothing will be, once no run moves with it and no call names it.
        for worker in 0..usize::from(N_WORKERS) {
            for idx in 0..self.arrivals[worker].len() {
                let mut state = self.clone();
                state.arrivals[worker].remove(idx);
                after.push(state);
            }
        }
        after
    }

    fn run_goes_on(&self, idx: usize, after: &mut Vec<Self>) {
        let run = &self.runs[idx];
        // A client that is gone frees its request.
        if !run.is_read {
            let mut state = self.clone();
            let run = state.runs.remove(idx);
            if let Moving::Offering { ticket, to } | Moving::Copying { ticket, to } = run.moving {
                state.call(Call::Forget { ticket, to });
            }
            after.push(state);
            return;
        }
        if run.next < N_TOKENS && !run.is_frozen {
            let mut state = self.clone();
            let run = &mut state.runs[idx];
            run.stream.push(Line::Progress(run.next));
            run.next += 1;
            after.push(state);
        }
    }

    fn gateway_goes_on(&self, after: &mut Vec<Self>) {
        let mut state = self.clone();
        match self.gateway {
            Gateway::Reading { sequence } => {
                let Some(run) = state.run(sequence) else { return };
                if run.stream.is_empty() {
                    return;
                }
                match run.stream.remove(0) {
                    Line::Progress(token) => {
                        assert_eq!(token, self.journal, "a token twice, or a hole: {self:#?}");
                        state.journal += 1;
                        if state.journal == N_TOKENS {
                            state.gateway = Gateway::Done;
                            state.drop_streams(None);
                        }
                    }
                    Line::Move { ticket, to } => state.follow(sequence, ticket, to),
                }
                after.push(state);
            }
            Gateway::Placing { failed } => {
                let is_usable = |worker: &WorkerId| self.is_alive[usize::from(*worker)];
                let mut usable: Vec<WorkerId> = (0..N_WORKERS).filter(is_usable).collect();
                if usable.is_empty() {
                    state.gateway = Gateway::Failed;
                    after.push(state);
                    return;
                }
                // The one that failed is asked again if there is no other.
                if 1 < usable.len() {
                    usable.retain(|worker| Some(*worker) != failed);
                }
                for to in usable {
                    let mut state = self.clone();
                    let number = state.next_call();
                    state.call(Call::Resume { number, to, from: state.journal, ticket: None });
                    state.gateway = Gateway::Replaying { number, to, failed };
                    after.push(state);
                }
            }
            _ => {}
        }
    }

    /// As `Continuer::follow`, up to the answer.
    fn follow(&mut self, source: u8, ticket: u8, to: WorkerId) {
        let number = self.next_call();
        self.call(Call::Resume { number, to, from: self.journal, ticket: Some(ticket) });
        self.gateway = Gateway::Following { number, source };
    }

    /// A call comes to a party.
    fn deliver(&mut self, call: Call) {
        match call {
            Call::BeginMove { sequence, to } => {
                let ticket = self.n_tickets;
                let Some(run) = self.run(sequence).filter(|run| run.moving == Moving::No) else { return };
                run.moving = Moving::Offering { ticket, to };
                self.n_tickets += 1;
                self.call(Call::Offer { sequence, ticket, to });
            }
            Call::Offer { sequence, ticket, to } => {
                if !self.is_alive[usize::from(to)] {
                    return self.move_fails(sequence, ticket);
                }
                let arrivals = &mut self.arrivals[usize::from(to)];
                if !arrivals.contains(&ticket) {
                    arrivals.push(ticket);
                }
                let Some(run) = self.run(sequence) else { return };
                if run.moving == (Moving::Offering { ticket, to }) {
                    run.moving = Moving::Copying { ticket, to };
                    self.call(Call::PutBlocks { sequence, ticket, to });
                }
            }
            Call::PutBlocks { sequence, ticket, to } => {
                let is_known =
                    self.is_alive[usize::from(to)] && self.arrivals[usize::from(to)].contains(&ticket);
                if !is_known {
                    return self.move_fails(sequence, ticket);
                }
                let Some(run) = self.run(sequence) else { return };
                if run.moving == (Moving::Copying { ticket, to }) {
                    // `freeze`, between two steps; a request that has ended is not frozen.
                    run.moving = Moving::No;
                    if run.next < N_TOKENS {
                        run.is_frozen = true;
                        run.stream.push(Line::Move { ticket, to });
                    } else {
                        self.call(Call::Forget { ticket, to });
                    }
                }
            }
            Call::Forget { ticket, to } => self.arrivals[usize::from(to)].retain(|held| *held != ticket),
            Call::Resume { number, to, from, ticket } => self.resume(number, to, from, ticket),
            Call::Thaw { number, sequence } => {
                let Some(run) = self.run(sequence) else { return self.call_fails(number) };
                run.is_frozen = false;
                if let Gateway::Thawing { number: awaited, source } = self.gateway
                    && awaited == number
                {
                    self.gateway = Gateway::Reading { sequence: source };
                }
            }
        }
    }

    fn resume(&mut self, number: u8, to: WorkerId, from: u8, ticket: Option<u8>) {
        if !self.is_alive[usize::from(to)] {
            return self.call_fails(number);
        }
        if let Some(ticket) = ticket {
            self.arrivals[usize::from(to)].retain(|held| *held != ticket);
        }
        let is_awaited = match self.gateway {
            Gateway::Following { number: awaited, .. } | Gateway::Replaying { number: awaited, .. } => {
                awaited == number
            }
            _ => false,
        };
        // A call whose caller is gone has no stream.
        let sequence = self.begin_run(to, from, is_awaited);
        if is_awaited {
            self.drop_streams(Some(sequence));
            self.gateway = Gateway::Reading { sequence };
        }
    }

    /// The source hears nothing good of its move: the request stays.
    fn move_fails(&mut self, sequence: u8, ticket: u8) {
        let Some(run) = self.run(sequence) else { return };
        if let Moving::Offering { ticket: own, to } | Moving::Copying { ticket: own, to } = run.moving
            && own == ticket
        {
            run.moving = Moving::No;
            self.call(Call::Forget { ticket, to });
        }
    }

    /// The gateway hears nothing good of its call `number`.
    fn call_fails(&mut self, number: u8) {
        match self.gateway {
            Gateway::Following { number: awaited, source } if awaited == number => {
                let number = self.next_call();
                self.call(Call::Thaw { number, sequence: source });
                self.gateway = Gateway::Thawing { number, source };
            }
            Gateway::Thawing { number: awaited, .. } if awaited == number => self.replay(None, false),
            Gateway::Replaying { number: awaited, to, .. } if awaited == number => {
                self.gateway = Gateway::Placing { failed: Some(to) };
            }
            _ => {}
        }
    }

    /// What goes wrong, and what is asked for from outside.
    fn disturbances(&self, bounds: Bounds) -> Vec<Self> {
        let mut after = Vec::new();
        let is_live = !matches!(self.gateway, Gateway::Done | Gateway::Failed | Gateway::Dead);
        if self.n_moves < bounds.moves && is_live {
            for run in self.runs.iter().filter(|run| run.is_read) {
                let mut state = self.clone();
                state.n_moves += 1;
                state.call(Call::BeginMove { sequence: run.sequence, to: 1 - run.worker });
                after.push(state);
            }
        }
        if self.n_doubled < bounds.doubled_calls {
            for call in &self.calls {
                let mut state = self.clone();
                state.n_doubled += 1;
                state.call(*call);
                after.push(state);
            }
        }
        if bounds.faults <= self.n_faults {
            return after;
        }
        let mut fault = |change: &dyn Fn(&mut Self)| {
            let mut state = self.clone();
            state.n_faults += 1;
            change(&mut state);
            after.push(state);
        };
        for (idx, call) in self.calls.iter().enumerate() {
            // Lost on its way, or only its answer; the caller cannot tell.
            fault(&|state| {
                state.calls.remove(idx);
                state.is_not_answered(*call);
            });
            fault(&|state| state.is_not_answered(*call));
        }
        for worker in (0..N_WORKERS).filter(|worker| self.is_alive[usize::from(*worker)]) {
            fault(&|state| state.worker_dies(worker));
        }
        if let Gateway::Reading { .. } = self.gateway {
            fault(&|state| state.stream_breaks());
        }
        if is_live {
            fault(&|state| {
                state.gateway = Gateway::Dead;
                state.drop_streams(None);
            });
        }
        after
    }

    fn is_not_answered(&mut self, call: Call) {
        match call {
            Call::Offer { sequence, ticket, .. } | Call::PutBlocks { sequence, ticket, .. } => {
                self.move_fails(sequence, ticket);
            }
            Call::Resume { number, .. } | Call::Thaw { number, .. } => self.call_fails(number),
            Call::BeginMove { .. } | Call::Forget { .. } => {}
        }
    }

    fn worker_dies(&mut self, worker: WorkerId) {
        self.is_alive[usize::from(worker)] = false;
        self.arrivals[usize::from(worker)].clear();
        let read = match self.gateway {
            Gateway::Reading { sequence } => Some(sequence),
            _ => None,
        };
        let is_broken = self.runs.iter().any(|run| run.worker == worker && Some(run.sequence) == read);
        self.runs.retain(|run| run.worker != worker);
        if is_broken {
            self.replay(Some(worker), true);
        }
    }

    fn stream_breaks(&mut self) {
        let Gateway::Reading { sequence } = self.gateway else { return };
        let failed = self.run(sequence).map(|run| run.worker);
        self.replay(failed, true);
    }

    /// Checks any state: the gateway reads one stream.
    fn check(&self) {
        assert!(self.runs.iter().filter(|run| run.is_read).count() <= 1, "two streams are held: {self:#?}");
    }

    /// Checks a state in which nothing happens by itself.
    fn check_rest(&self) {
        assert!(self.runs.is_empty() && self.arrivals.iter().all(Vec::is_empty), "held for ever: {self:#?}");
        let has_worker = self.is_alive.contains(&true);
        let may_fail = !has_worker || MAX_CONTINUATIONS <= self.n_continued;
        match self.gateway {
            Gateway::Done => assert_eq!(self.journal, N_TOKENS),
            Gateway::Failed => assert!(may_fail, "an error without need: {self:#?}"),
            Gateway::Dead => {}
            _ => panic!("an answer that does not go on: {self:#?}"),
        }
    }
}

/// Visits all states; their number.
pub(crate) fn search(bounds: Bounds) -> usize {
    let mut numbers = HashMap::from([(State::start(), 0)]);
    let mut open = vec![(State::start(), 0)];
    // By number: the states that follow without a disturbance.
    let mut after: Vec<Vec<usize>> = vec![Vec::new()];
    while let Some((state, number)) = open.pop() {
        state.check();
        let progress = state.progress();
        if progress.is_empty() {
            state.check_rest();
        }
        let n_progress = progress.len();
        for (idx, next) in progress.into_iter().chain(state.disturbances(bounds)).enumerate() {
            let n_known = numbers.len();
            let next_number = *numbers.entry(next.clone()).or_insert(n_known);
            if next_number == n_known {
                after.push(Vec::new());
                open.push((next, next_number));
            }
            if idx < n_progress {
                after[number].push(next_number);
            }
        }
    }
    check_no_circle(&after);
    after.len()
}

/// Checks that each state comes to an end if nothing disturbs it: those that can only be left are taken away, until none is left.
fn check_no_circle(after: &[Vec<usize>]) {
    let mut n_before = vec![0_usize; after.len()];
    for next in after.iter().flatten() {
        n_before[*next] += 1;
    }
    let mut open: Vec<usize> = (0..after.len()).filter(|number| n_before[*number] == 0).collect();
    let mut n_taken = 0;
    while let Some(number) = open.pop() {
        n_taken += 1;
        for next in &after[number] {
            n_before[*next] -= 1;
            if n_before[*next] == 0 {
                open.push(*next);
            }
        }
    }
    assert_eq!(n_taken, after.len(), "some states go round in a circle");
}

#[test]
fn no_way_of_moving_a_request_loses_or_repeats_a_token_or_holds_anything_for_ever() {
    let n_states = search(Bounds { moves: 1, faults: 1, doubled_calls: 1 });
    // A model in which little can happen would prove little.
    assert!(10_000 < n_states, "{n_states}");
}
