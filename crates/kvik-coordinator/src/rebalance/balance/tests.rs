use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const SETTINGS: BalanceSettings = BalanceSettings {
    load_factor: 0.25,
    move_interval: Duration::from_millis(100),
    min_stay: Duration::from_secs(30),
};

fn worker(id: usize, n_sequences: u64) -> BalancedWorker {
    BalancedWorker {
        id: format!("worker-{id}"),
        model: "m".to_owned(),
        weight: 1.0,
        is_ready: true,
        n_sequences,
    }
}

fn workers(loads: &[u64]) -> Vec<BalancedWorker> {
    loads.iter().enumerate().map(|(id, load)| worker(id, *load)).collect()
}

fn request(id: &str, outputs: u64) -> RunningSequence {
    RunningSequence {
        id: id.to_owned(),
        seq_id: None,
        path: "/v1/completions".to_owned(),
        prompt_tokens: 10,
        output_tokens: 5,
        can_move: true,
        is_moving: false,
        outputs,
        tokens_left: 1000 * outputs,
        moved_ms_ago: None,
    }
}

fn choose(loads: &[u64]) -> Option<Transfer> {
    Balance::new(SETTINGS).choose(&workers(loads), Duration::ZERO)
}

#[test]
fn a_worker_gives_only_above_its_bound_and_to_one_below_its_share() {
    assert_eq!(choose(&[]), None);
    assert_eq!(choose(&[100]), None);
    assert_eq!(choose(&[5, 5]), None);
    // 2 of a share of 1: less than one sequence would be gained.
    assert_eq!(choose(&[2, 0]), None);
    // 12 of a share of 10, and the bound is 12.5.
    assert_eq!(choose(&[12, 8]), None);
    assert_eq!(choose(&[13, 7]), Some(Transfer { from: 0, to: 1, max_sequences: 3 }));
    assert_eq!(choose(&[0, 9, 30]), Some(Transfer { from: 2, to: 0, max_sequences: 13 }));
}

#[test]
fn a_worker_that_has_begun_to_give_goes_on_down_to_its_share() {
    let mut balance = Balance::new(SETTINGS);
    assert!(balance.choose(&workers(&[13, 7]), Duration::ZERO).is_some());
    assert!(balance.choose(&workers(&[12, 8]), Duration::ZERO).is_some());
    assert!(balance.choose(&workers(&[11, 9]), Duration::ZERO).is_some());
    assert!(balance.choose(&workers(&[10, 10]), Duration::ZERO).is_none());
    assert!(balance.choose(&workers(&[12, 8]), Duration::ZERO).is_none());
}

#[test]
fn workers_that_drain_and_those_of_other_models_have_no_part() {
    let mut all = workers(&[20, 0, 0]);
    all[1].is_ready = false;
    all[2].model = "other".to_owned();
    let mut balance = Balance::new(SETTINGS);
    assert_eq!(balance.choose(&all, Duration::ZERO), None);
    all[2].model = "m".to_owned();
    assert_eq!(balance.choose(&all, Duration::ZERO).map(|transfer| transfer.to), Some(2));
    all[0].is_ready = false;
    assert_eq!(balance.choose(&all, Duration::ZERO), None);
}

#[test]
fn a_worker_without_weight_gives_everything_away() {
    let mut all = workers(&[3, 3]);
    all[0].weight = 0.0;
    let transfer = Balance::new(SETTINGS).choose(&all, Duration::ZERO);
    assert_eq!(transfer, Some(Transfer { from: 0, to: 1, max_sequences: 3 }));
    all[1].weight = 0.0;
    assert_eq!(Balance::new(SETTINGS).choose(&all, Duration::ZERO), None);
}

#[test]
fn the_request_with_the_most_to_go_is_picked_among_those_that_may_move() {
    let mut balance = Balance::new(SETTINGS);
    let changed = |id: &str, change: fn(&mut RunningSequence)| {
        let mut request = request(id, 1);
        change(&mut request);
        request
    };
    let running = [
        changed("cannot", |request| request.can_move = false),
        changed("moves", |request| request.is_moving = true),
        changed("came", |request| request.moved_ms_ago = Some(29_999)),
        changed("ends", |request| request.tokens_left = 31),
        request("large", 3),
        changed("stayed", |request| request.moved_ms_ago = Some(30_000)),
        changed("long", |request| request.prompt_tokens = 9),
        changed("short", |request| request.tokens_left = 999),
    ];
    let mut picked = |now_s: u64| {
        let picked = balance.pick(&running, 2, Duration::from_secs(now_s));
        picked.map(|request| request.id.as_str())
    };
    assert_eq!(picked(0), Some("long"));
    assert_eq!(picked(1), Some("stayed"));
    assert_eq!(picked(2), Some("short"));
    assert_eq!(picked(29), None);
    assert_eq!(picked(30), Some("long"));
}

/// A fleet whose requests come, end and move.
#[derive(Debug)]
struct Fleet {
    workers: Vec<BalancedWorker>,
    /// By request: its worker, its sequences, and when it last moved.
    requests: HashMap<String, (usize, u64, Option<Duration>)>,
    balance: Balance,
    n_named: usize,
    n_moves: usize,
}

impl Fleet {
    fn new(weights: &[f64], requests: &[(usize, u64)]) -> Self {
        let worker = |(id, weight): (usize, &f64)| BalancedWorker { weight: *weight, ..worker(id, 0) };
        let mut fleet = Self {
            workers: weights.iter().enumerate().map(worker).collect(),
            requests: HashMap::new(),
            balance: Balance::new(SETTINGS),
            n_named: 0,
            n_moves: 0,
        };
        for (place, outputs) in requests {
            fleet.arrive(place % weights.len(), *outputs, None);
        }
        fleet
    }

    /// A request has another name on each worker.
    fn arrive(&mut self, place: usize, outputs: u64, moved: Option<Duration>) {
        self.n_named += 1;
        self.requests.insert(format!("request-{:05}", self.n_named), (place, outputs, moved));
        self.workers[place].n_sequences += outputs;
    }

    fn running(&self, place: usize, now: Duration) -> Vec<RunningSequence> {
        let here = self.requests.iter().filter(|(_, (worker, ..))| *worker == place);
        let describe =
            |(id, (_, outputs, moved)): (&String, &(usize, u64, Option<Duration>))| RunningSequence {
                moved_ms_ago: moved.map(|moved| now.saturating_sub(moved).as_millis() as u64),
                ..request(id, *outputs)
            };
        here.map(describe).collect()
    }

    /// One turn; whether a request has moved.
    fn turn(&mut self, now: Duration) -> Result<bool, TestCaseError> {
        let Some(transfer) = self.balance.choose(&self.workers, now) else { return Ok(false) };
        let running = self.running(transfer.from, now);
        let Some(picked) = self.balance.pick(&running, transfer.max_sequences, now) else { return Ok(false) };
        let (place, outputs, moved) = self.requests.remove(&picked.id).unwrap();
        prop_assert_eq!(place, transfer.from);
        prop_assert!(moved.is_none_or(|moved| moved + SETTINGS.min_stay <= now), "it has moved before");
        self.workers[place].n_sequences -= outputs;
        self.arrive(transfer.to, outputs, Some(now));
        let (source, destination) = (&self.workers[transfer.from], &self.workers[transfer.to]);
        prop_assert!(fullness(destination) <= fullness(source) + 1e-9, "it went to a fuller worker");
        self.n_moves += 1;
        Ok(true)
    }

    /// Falls with every move: how uneven the loads are.
    fn unevenness(&self) -> f64 {
        let square = |worker: &BalancedWorker| (worker.n_sequences as f64).powi(2) / worker.weight;
        self.workers.iter().map(square).sum()
    }
}

/// Weights of workers, and requests with their workers and sequences.
fn fleets() -> impl Strategy<Value = (Vec<f64>, Vec<(usize, u64)>)> {
    let weight = prop_oneof![Just(1.0), Just(0.5), Just(2.0), 0.1..4.0_f64];
    (prop::collection::vec(weight, 1..6), prop::collection::vec((0..6_usize, 1..4_u64), 0..60))
}

proptest! {
    #[test]
    fn loads_that_do_not_change_by_themselves_settle((weights, requests) in fleets()) {
        let mut fleet = Fleet::new(&weights, &requests);
        let (mut now, mut last) = (Duration::ZERO, fleet.unevenness());
        for _ in 0..=requests.len() {
            now += SETTINGS.move_interval;
            if fleet.turn(now)? {
                prop_assert!(fleet.unevenness() < last);
                last = fleet.unevenness();
            }
        }
        // Each request moves once at most before it has stayed, and then nothing moves any more.
        prop_assert!(fleet.n_moves <= requests.len());
        for _ in 0..10 {
            now += SETTINGS.min_stay;
            while fleet.turn(now)? {
                prop_assert!(fleet.unevenness() < last);
                last = fleet.unevenness();
                now += SETTINGS.move_interval;
            }
        }
        now += SETTINGS.min_stay;
        prop_assert!(!fleet.turn(now)?);
    }

    #[test]
    fn requests_of_one_sequence_end_within_the_bounds(n_workers in 1..6_usize, places in prop::collection::vec(0..6_usize, 0..60)) {
        let requests: Vec<(usize, u64)> = places.into_iter().map(|place| (place, 1)).collect();
        let mut fleet = Fleet::new(&vec![1.0; n_workers], &requests);
        let mut now = Duration::ZERO;
        while fleet.turn(now)? {
            now += SETTINGS.move_interval;
        }
        let share = requests.len() as f64 / n_workers as f64;
        for worker in &fleet.workers {
            prop_assert!(worker.n_sequences as f64 <= (share * 1.25).max(share + 1.0).ceil(), "{:?}", fleet.workers);
        }
    }

    #[test]
    fn moves_are_never_faster_than_allowed_nor_back_and_forth(
        (weights, requests) in fleets(),
        turns in prop::collection::vec((0..200_u64, 0..6_usize, any::<bool>()), 0..200),
    ) {
        let mut fleet = Fleet::new(&weights, &requests);
        let (mut now, mut last) = (Duration::ZERO, None);
        for (pause_ms, place, arrives) in turns {
            now += Duration::from_millis(pause_ms);
            let place = place % weights.len();
            let ending = fleet.requests.iter().find(|(_, (worker, ..))| *worker == place).map(|(id, _)| id.clone());
            if arrives {
                fleet.arrive(place, 1, None);
            } else if let Some((worker, outputs, _)) = ending.and_then(|id| fleet.requests.remove(&id)) {
                fleet.workers[worker].n_sequences -= outputs;
            }
            // The turn itself checks that the request has not moved within its stay.
            if fleet.turn(now)? {
                prop_assert!(last.is_none_or(|last| last + SETTINGS.move_interval <= now));
                last = Some(now);
            }
        }
    }
}
