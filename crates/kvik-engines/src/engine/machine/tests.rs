//! The machine against what must hold whatever happens.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use tokio::time::Instant;

use super::{EngineRules, Entry, Failure, Generation, Machine, Order, Phase, Rules};

const ENGINE: EngineRules = EngineRules { sleeps: true, after_idle: None, drain: Duration::from_secs(10) };

/// Requests for the engine that has a name now.
trait Requests {
    fn ask_for(&mut self, name: &str) -> bool;
    fn let_in(&mut self, name: &str, now: Instant) -> Entry;
    fn let_go(&mut self, name: &str, has_entered: bool, now: Instant) -> bool;
}

impl Requests for Machine {
    fn ask_for(&mut self, name: &str) -> bool {
        self.begin(name).is_some()
    }

    fn let_in(&mut self, name: &str, now: Instant) -> Entry {
        let generation = self.engine(name).map_or(Generation(0), |engine| engine.generation);
        self.enter(name, generation, now)
    }

    fn let_go(&mut self, name: &str, has_entered: bool, now: Instant) -> bool {
        let generation = self.engine(name).unwrap().generation;
        self.leave(name, generation, has_entered, now)
    }
}

fn rules(max_awake: usize) -> Rules {
    Rules {
        max_awake: Some(max_awake),
        max_starting: 4,
        turn: Duration::from_secs(5),
        max_waiting: 100,
        wakes_on_request: true,
    }
}

fn failure(summary: &str) -> Failure {
    Failure { summary: summary.to_owned(), detail: Some("a line of its log".to_owned()) }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn machine(names: &[&str], max_awake: usize, now: Instant) -> Machine {
    let mut machine = Machine::new(rules(max_awake));
    for (place, name) in names.iter().enumerate() {
        machine.add(name, place, ENGINE, false, now);
    }
    machine
}

fn phase(machine: &Machine, name: &str) -> Phase {
    machine.engine(name).unwrap().phase
}

/// Asks for an engine and lets it wake at once.
fn serve(machine: &mut Machine, name: &str, now: Instant) {
    assert!(machine.ask_for(name));
    assert_eq!(machine.schedule(now), [(name.to_owned(), Order::Wake)]);
    machine.woke(name, now);
    assert_eq!(machine.let_in(name, now), Entry::Entered);
}

#[test]
fn a_request_wakes_its_engine_once_and_the_longest_idle_makes_room() {
    let now = Instant::now();
    let mut machine = machine(&["a", "b", "c"], 2, now);
    serve(&mut machine, "a", now);
    serve(&mut machine, "b", now);
    machine.let_go("b", true, now + seconds(1));
    machine.let_go("a", true, now + seconds(2));
    // Twenty requests are one wake.
    for _ in 0..20 {
        assert!(machine.ask_for("c"));
        assert_eq!(machine.let_in("c", now), Entry::Wait);
    }
    assert_eq!(machine.schedule(now + seconds(2)), [("b".to_owned(), Order::Sleep)]);
    assert_eq!(machine.schedule(now + seconds(2)), []);
    machine.slept("b", now + seconds(3));
    assert_eq!(machine.schedule(now + seconds(3)), [("c".to_owned(), Order::Wake)]);
    machine.woke("c", now + seconds(4));
    for _ in 0..20 {
        assert_eq!(machine.let_in("c", now + seconds(4)), Entry::Entered);
    }
    let engine = machine.engine("c").unwrap();
    assert_eq!((engine.in_flight, engine.waiting, engine.n_wakes), (20, 0, 1));
    assert_eq!(engine.last_wake, Some(seconds(2)));
}

#[test]
fn an_engine_with_a_stream_stays_until_a_turn_is_over_and_then_until_the_stream_ends() {
    let now = Instant::now();
    let mut machine = machine(&["a", "b"], 1, now);
    serve(&mut machine, "a", now);
    assert!(machine.ask_for("b"));
    assert_eq!(machine.schedule(now + seconds(4)), []);
    assert_eq!(phase(&machine, "a"), Phase::Ready);
    assert_eq!(machine.schedule(now + seconds(9)), []);
    assert_eq!(phase(&machine, "a"), Phase::GivingWay);
    // What comes now waits for its next turn.
    assert!(machine.ask_for("a"));
    assert_eq!(machine.let_in("a", now + seconds(9)), Entry::Wait);
    assert_eq!(machine.schedule(now + seconds(60)), []);
    machine.let_go("a", true, now + seconds(60));
    assert_eq!(machine.schedule(now + seconds(60)), [("a".to_owned(), Order::Sleep)]);
    machine.slept("a", now + seconds(61));
    assert_eq!(machine.schedule(now + seconds(61)), [("b".to_owned(), Order::Wake)]);
    assert_eq!(phase(&machine, "a"), Phase::Queued);
}

#[test]
fn an_engine_serves_on_if_those_it_gave_way_to_have_left() {
    let now = Instant::now();
    let mut machine = machine(&["a", "b"], 1, now);
    serve(&mut machine, "a", now);
    assert!(machine.ask_for("b"));
    machine.schedule(now);
    machine.schedule(now + seconds(6));
    assert_eq!(phase(&machine, "a"), Phase::GivingWay);
    assert!(machine.let_go("b", false, now + seconds(6)));
    assert_eq!(machine.schedule(now + seconds(6)), []);
    assert_eq!((phase(&machine, "a"), phase(&machine, "b")), (Phase::Ready, Phase::Asleep));
}

#[test]
fn idle_time_counts_from_the_end_of_the_last_request() {
    let now = Instant::now();
    let mut machine = Machine::new(Rules { max_awake: None, ..rules(1) });
    machine.add("a", 0, EngineRules { after_idle: Some(seconds(10)), ..ENGINE }, true, now);
    assert_eq!(machine.schedule(now), [("a".to_owned(), Order::Wake)]);
    machine.woke("a", now);
    assert!(machine.ask_for("a"));
    assert_eq!(machine.let_in("a", now), Entry::Entered);
    assert_eq!(machine.schedule(now + seconds(100)), []);
    machine.let_go("a", true, now + seconds(100));
    assert_eq!(machine.schedule(now + seconds(109)), []);
    assert_eq!(machine.schedule(now + seconds(110)), [("a".to_owned(), Order::Sleep)]);
    machine.slept("a", now + seconds(110));
    assert_eq!(machine.schedule(now + seconds(111)), []);
}

#[test]
fn one_that_never_had_a_request_sleeps_too() {
    let now = Instant::now();
    let mut machine = Machine::new(Rules { max_awake: None, ..rules(1) });
    machine.add("a", 0, EngineRules { after_idle: Some(seconds(10)), ..ENGINE }, true, now);
    machine.schedule(now);
    machine.woke("a", now + seconds(5));
    assert_eq!(machine.schedule(now + seconds(15)), [("a".to_owned(), Order::Sleep)]);
}

#[test]
fn a_start_that_fails_is_told_to_those_that_wait_and_tried_again_later() {
    let now = Instant::now();
    let mut machine = machine(&["a"], 1, now);
    assert!(machine.ask_for("a"));
    assert_eq!(machine.schedule(now).len(), 1);
    machine.failed("a", failure("exit code 7"), now);
    let Entry::Refused { why, retry_after } = machine.let_in("a", now) else { panic!("let in") };
    assert!(why.contains("exit code 7") && !why.contains("log"), "{why}");
    assert_eq!(retry_after, seconds(1));
    machine.let_go("a", false, now);
    assert_eq!(machine.schedule(now + seconds(100)), []);
    assert!(machine.ask_for("a"));
    assert_eq!(machine.let_in("a", now + seconds(100)), Entry::Wait);
    assert_eq!(machine.schedule(now + seconds(100)), [("a".to_owned(), Order::Wake)]);
    machine.failed("a", failure("exit code 7"), now + seconds(100));
    let Entry::Refused { retry_after, .. } = machine.let_in("a", now + seconds(100)) else {
        panic!("let in")
    };
    assert_eq!(retry_after, seconds(2));
}

#[test]
fn an_engine_that_breaks_after_a_while_starts_again_at_once_and_later_if_it_goes_on() {
    let now = Instant::now();
    let mut machine = machine(&["a"], 1, now);
    serve(&mut machine, "a", now);
    machine.failed("a", failure("killed"), now + seconds(31));
    machine.let_go("a", true, now + seconds(31));
    assert_eq!(machine.schedule(now + seconds(31)), [("a".to_owned(), Order::Wake)]);
    machine.woke("a", now + seconds(31));
    machine.failed("a", failure("killed"), now + seconds(32));
    assert_eq!(machine.schedule(now + seconds(32)), []);
    assert_eq!(machine.schedule(now + seconds(33)), [("a".to_owned(), Order::Wake)]);
    assert_eq!(machine.engine("a").unwrap().n_restarts, 2);
}

#[test]
fn an_engine_that_breaks_again_and_again_makes_no_room_for_itself() {
    let now = Instant::now();
    let mut machine = Machine::new(rules(1));
    machine.add("broken", 0, ENGINE, true, now);
    machine.add("good", 1, ENGINE, false, now);
    assert_eq!(machine.schedule(now), [("broken".to_owned(), Order::Wake)]);
    machine.failed("broken", failure("no weights"), now);
    serve(&mut machine, "good", now);
    machine.let_go("good", true, now);
    // It is idle, and stays for what comes next.
    assert_eq!(machine.schedule(now + seconds(100)), []);
    assert_eq!((phase(&machine, "broken"), phase(&machine, "good")), (Phase::Queued, Phase::Ready));
    // An operator has the last word.
    machine.want("broken", now + seconds(100));
    assert_eq!(machine.schedule(now + seconds(100)), [("good".to_owned(), Order::Sleep)]);
    machine.slept("good", now + seconds(101));
    assert_eq!(machine.schedule(now + seconds(101)), [("broken".to_owned(), Order::Wake)]);
}

#[test]
fn an_engine_that_never_sleeps_makes_no_room() {
    let now = Instant::now();
    let mut machine = Machine::new(rules(2));
    machine.add("always", 0, EngineRules { sleeps: false, ..ENGINE }, true, now);
    machine.add("a", 1, ENGINE, false, now);
    machine.add("b", 2, ENGINE, false, now);
    machine.schedule(now);
    machine.woke("always", now);
    serve(&mut machine, "a", now + seconds(1));
    machine.let_go("a", true, now + seconds(2));
    assert!(machine.ask_for("b"));
    assert_eq!(machine.schedule(now + seconds(2)), [("a".to_owned(), Order::Sleep)]);
    assert!(machine.suspend("always", now).is_err());
}

#[test]
fn an_operator_cannot_suspend_an_engine_with_requests() {
    let now = Instant::now();
    let mut machine = machine(&["a"], 1, now);
    serve(&mut machine, "a", now);
    let why = machine.suspend("a", now).unwrap_err();
    assert_eq!(why, "it is ready with 1 requests in flight and 0 that wait");
    machine.let_go("a", true, now);
    assert_eq!(machine.suspend("a", now), Ok(Some(Order::Sleep)));
    machine.sleep_failed("a", "busy".to_owned(), now);
    assert_eq!(phase(&machine, "a"), Phase::Ready);
}

#[test]
fn a_removed_engine_ends_after_its_requests_or_its_time() {
    let now = Instant::now();
    let mut machine = machine(&["a", "b"], 2, now);
    serve(&mut machine, "a", now);
    serve(&mut machine, "b", now);
    machine.remove("a", now);
    machine.remove("b", now);
    assert!(machine.ask_for("a"));
    assert!(matches!(machine.let_in("a", now), Entry::Refused { .. }));
    assert_eq!(machine.schedule(now), []);
    machine.let_go("a", true, now);
    assert_eq!(machine.schedule(now), [("a".to_owned(), Order::Stop)]);
    assert_eq!(machine.schedule(now + seconds(10)), [("b".to_owned(), Order::Stop)]);
    machine.stopped("a");
    assert!(machine.engine("a").is_none());
    assert!(matches!(machine.let_in("a", now), Entry::Refused { .. }));
}

#[test]
fn engines_start_in_the_order_of_the_file_and_few_at_a_time() {
    let now = Instant::now();
    let mut machine = Machine::new(Rules { max_awake: None, max_starting: 1, ..rules(1) });
    for (place, name) in ["c", "a", "b"].iter().enumerate() {
        machine.add(name, place, ENGINE, true, now);
    }
    let mut order = Vec::new();
    for _ in 0..3 {
        let orders = machine.schedule(now);
        let [(name, Order::Wake)] = orders.as_slice() else { panic!("{orders:?}") };
        machine.woke(name, now);
        order.push(name.clone());
    }
    assert_eq!(order, ["c", "a", "b"]);
}

#[test]
fn a_request_of_an_engine_that_is_gone_does_not_count_for_the_next_one_of_that_name() {
    let now = Instant::now();
    let mut machine = machine(&["a"], 1, now);
    let old = machine.begin("a").unwrap();
    machine.schedule(now);
    machine.woke("a", now);
    assert_eq!(machine.enter("a", old, now), Entry::Entered);
    machine.remove("a", now);
    assert!(machine.is_leaving("a"));
    machine.schedule(now + seconds(10));
    machine.stopped("a");
    machine.add("a", 0, ENGINE, false, now);
    let new = machine.begin("a").unwrap();
    machine.schedule(now);
    machine.woke("a", now);
    assert_eq!(machine.enter("a", new, now), Entry::Entered);
    assert!(!machine.leave("a", old, true, now));
    assert!(matches!(machine.enter("a", old, now), Entry::Refused { .. }));
    assert_eq!(machine.engine("a").unwrap().in_flight, 1);
}

#[test]
fn too_many_do_not_wait() {
    let now = Instant::now();
    let mut machine = Machine::new(Rules { max_waiting: 2, ..rules(1) });
    machine.add("a", 1, ENGINE, false, now);
    assert!(machine.ask_for("a") && machine.ask_for("a") && !machine.ask_for("a"));
    assert!(!machine.ask_for("nothing"));
}

/// What may happen to a machine.
#[derive(Debug, Clone)]
enum Step {
    Begin(usize),
    Enter(usize),
    Leave(usize, bool),
    /// The outcome of the order that an engine has.
    Done(usize, bool),
    Break(usize),
    Pass(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let engine = 0..5_usize;
    let step = prop_oneof![
        engine.clone().prop_map(Step::Begin),
        engine.clone().prop_map(Step::Enter),
        (engine.clone(), any::<bool>()).prop_map(|(engine, has_entered)| Step::Leave(engine, has_entered)),
        (engine.clone(), prop::bool::weighted(0.9)).prop_map(|(engine, is_good)| Step::Done(engine, is_good)),
        engine.prop_map(Step::Break),
        (0..8_u64).prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 1..200)
}

proptest! {
    #[test]
    fn no_engine_sleeps_with_a_request_and_every_request_is_served_in_the_end(steps in steps()) {
        let mut now = Instant::now();
        let names = ["a", "b", "c", "d", "e"];
        let mut machine = machine(&names, 2, now);
        let mut given: BTreeMap<String, Order> = BTreeMap::new();
        // Requests that wait and that were let in, by engine.
        let mut requests = [(0_usize, 0_usize); 5];
        let play = |machine: &mut Machine, given: &mut BTreeMap<String, Order>, now: Instant| {
            for (name, order) in machine.schedule(now) {
                let in_flight = machine.engine(&name).unwrap().in_flight;
                assert!(order != Order::Sleep || in_flight == 0, "{name} sleeps with {in_flight} requests");
                assert!(given.insert(name.clone(), order).is_none(), "{name} has two orders");
            }
            let n_awake = names.iter().filter(|name| phase(machine, name).holds_room()).count();
            assert!(n_awake <= 2, "{n_awake} are awake");
        };
        let finish = |machine: &mut Machine, given: &mut BTreeMap<String, Order>, name: &str, is_good: bool, now: Instant| {
            match (given.remove(name), is_good) {
                (Some(Order::Wake), true) => machine.woke(name, now),
                (Some(Order::Sleep), true) => machine.slept(name, now),
                (Some(Order::Sleep), false) => machine.sleep_failed(name, "no".to_owned(), now),
                (Some(Order::Wake | Order::Stop), _) => machine.failed(name, failure("no"), now),
                (None, _) => {}
            }
        };
        for step in steps {
            match step {
                Step::Begin(engine) => requests[engine].0 += usize::from(machine.ask_for(names[engine])),
                Step::Enter(engine)
                    if 0 < requests[engine].0 && machine.let_in(names[engine], now) == Entry::Entered =>
                {
                    requests[engine].0 -= 1;
                    requests[engine].1 += 1;
                }
                Step::Leave(engine, true) if 0 < requests[engine].1 => {
                    requests[engine].1 -= 1;
                    machine.let_go(names[engine], true, now);
                }
                Step::Leave(engine, false) if 0 < requests[engine].0 => {
                    requests[engine].0 -= 1;
                    machine.let_go(names[engine], false, now);
                }
                Step::Done(engine, is_good) => finish(&mut machine, &mut given, names[engine], is_good, now),
                // A process that ends while it has an order fails that order.
                Step::Break(engine) if !given.contains_key(names[engine]) => {
                    machine.failed(names[engine], failure("broke"), now);
                }
                Step::Pass(time) => now += Duration::from_secs(time),
                _ => {}
            }
            play(&mut machine, &mut given, now);
            for (engine, name) in names.iter().enumerate() {
                let state = machine.engine(name).unwrap();
                prop_assert_eq!((state.waiting, state.in_flight), requests[engine]);
                if 0 < state.in_flight {
                    prop_assert!(!matches!(state.phase, Phase::FallingAsleep | Phase::Asleep if given.contains_key(*name)));
                }
            }
        }
        // From now on all goes well, and streams end.
        for _ in 0..400 {
            now += Duration::from_secs(1);
            for (engine, name) in names.iter().enumerate() {
                finish(&mut machine, &mut given, name, true, now);
                if 0 < requests[engine].1 {
                    requests[engine].1 -= 1;
                    machine.let_go(name, true, now);
                }
                if 0 < requests[engine].0 && machine.let_in(name, now) == Entry::Entered {
                    requests[engine].0 -= 1;
                    requests[engine].1 += 1;
                }
            }
            play(&mut machine, &mut given, now);
        }
        prop_assert_eq!(requests, [(0, 0); 5]);
    }
}
