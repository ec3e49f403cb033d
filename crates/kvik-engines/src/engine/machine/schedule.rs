//! What the engines are to do next.

use tokio::time::Instant;

use super::{Engine, Machine, Order, Phase};

impl Machine {
    /// Decides what is to be done now; each order is given once.
    pub(crate) fn schedule(&mut self, now: Instant) -> Vec<(String, Order)> {
        let mut orders = Vec::new();
        self.settle(now, &mut orders);
        self.wake_queued(now, &mut orders);
        self.make_room(now, &mut orders);
        orders
    }

    /// What each engine does for itself.
    fn settle(&mut self, now: Instant, orders: &mut Vec<(String, Order)>) {
        let wakes_on_request = self.rules.wakes_on_request;
        let mut changes = Vec::new();
        for (name, engine) in &mut self.engines {
            let is_asked_for = engine.want.is_some() || (0 < engine.waiting && wakes_on_request);
            let idle_since = engine.last_used.max(engine.sleep_at);
            let is_idle = engine.in_flight == 0 && engine.waiting == 0;
            let phase = match engine.phase {
                Phase::Stopping | Phase::Starting | Phase::FallingAsleep => continue,
                _ if let Some(leaving_since) = engine.leaving_since => {
                    if 0 < engine.in_flight && now < leaving_since + engine.rules.drain {
                        continue;
                    }
                    orders.push((name.clone(), Order::Stop));
                    Phase::Stopping
                }
                Phase::Asleep | Phase::Failed if is_asked_for && engine.retry_at <= now => {
                    engine.ticket = self.next_ticket;
                    engine.asked_at.get_or_insert(now);
                    Phase::Queued
                }
                Phase::Queued if !is_asked_for => {
                    engine.asked_at = None;
                    Phase::Asleep
                }
                Phase::GivingWay if engine.in_flight == 0 => {
                    orders.push((name.clone(), Order::Sleep));
                    Phase::FallingAsleep
                }
                Phase::Ready
                    if is_idle
                        && engine.rules.sleeps
                        && engine.rules.after_idle.is_some_and(|after| idle_since + after <= now) =>
                {
                    orders.push((name.clone(), Order::Sleep));
                    Phase::FallingAsleep
                }
                _ => continue,
            };
            changes.push((name.clone(), phase));
        }
        self.next_ticket += 1;
        for (name, phase) in changes {
            self.change(&name, phase, now);
        }
    }

    /// Gives room that is there to those that wait, the longest wait first.
    fn wake_queued(&mut self, now: Instant, orders: &mut Vec<(String, Order)>) {
        loop {
            let has_room = self.has_room();
            let may_start = self.count(|phase| phase == Phase::Starting) < self.rules.max_starting;
            let Some(name) = self.first_queued().filter(|_| has_room && may_start) else { return };
            self.change(&name, Phase::Starting, now);
            orders.push((name, Order::Wake));
        }
    }

    /// Puts others to sleep for those that wait: the idle ones, the longest idle first; where there is none and the wait has
    /// taken a turn, the one that has been ready for longest gives way.
    fn make_room(&mut self, now: Instant, orders: &mut Vec<(String, Order)>) {
        let Some(max_awake) = self.rules.max_awake else { return };
        let is_pressing = |engine: &&Engine| engine.phase == Phase::Queued && engine.is_pressing();
        let n_pressing = self.engines.values().filter(is_pressing).count();
        let n_needed = (self.count(Phase::holds_room) + n_pressing).saturating_sub(max_awake);
        let mut n_freed =
            self.count(|phase| matches!(phase, Phase::FallingAsleep | Phase::Stopping | Phase::GivingWay));
        while n_freed < n_needed {
            let sleepers = || self.engines.iter().filter(|(_, engine)| engine.may_sleep(now));
            let idle = sleepers().filter(|(_, engine)| engine.in_flight == 0 && engine.waiting == 0);
            if let Some(name) = idle.min_by_key(|(_, engine)| engine.last_used).map(|(name, _)| name.clone())
            {
                self.change(&name, Phase::FallingAsleep, now);
                orders.push((name, Order::Sleep));
                n_freed += 1;
                continue;
            }
            let is_overdue = |since: Instant| self.rules.turn <= now.saturating_duration_since(since);
            let waits_too_long =
                self.engines.values().filter(is_pressing).any(|engine| is_overdue(engine.since));
            let busy = sleepers().filter(|(_, engine)| is_overdue(engine.since));
            let busy = busy.min_by_key(|(_, engine)| engine.since).map(|(name, _)| name.clone());
            let Some(name) = busy.filter(|_| waits_too_long) else { break };
            self.change(&name, Phase::GivingWay, now);
            n_freed += 1;
        }
        // Those that waited may have left.
        while n_needed < n_freed {
            let giving = self.engines.iter().find(|(_, engine)| engine.phase == Phase::GivingWay);
            let Some(name) = giving.map(|(name, _)| name.clone()) else { return };
            self.change(&name, Phase::Ready, now);
            n_freed -= 1;
        }
    }
}
