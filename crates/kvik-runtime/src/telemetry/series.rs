//! Metrics of things that come and go: a worker, a source of events.
//!
//! The process' recorder keeps every series for ever. What is labeled with the name of something that can leave is kept
//! here instead and is rendered only while its [`MetricSet`] exists, so that the number of series is that of the things
//! there are, and a worker that left shows no state.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Counter, Gauge};
use parking_lot::{Mutex, MutexGuard};

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { next_number: 0, families: BTreeMap::new() });

/// Gauges and counters with the same labels, which `/metrics` shows until this is dropped.
///
/// Where two sets have the same labels the later one is shown.
#[derive(Debug)]
pub struct MetricSet {
    /// As they are rendered.
    labels: String,
    number: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Gauge,
    Counter,
}

struct Registry {
    next_number: u64,
    /// By the name of the metric.
    families: BTreeMap<&'static str, Family>,
}

struct Family {
    kind: Kind,
    /// By labels and the set's number.
    series: BTreeMap<(String, u64), Arc<AtomicU64>>,
}

impl MetricSet {
    /// A set with these labels.
    pub fn new(labels: &[(&'static str, &str)]) -> Self {
        let mut rendered = String::new();
        for (name, value) in labels {
            let value = value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
            let separator = if rendered.is_empty() { "" } else { "," };
            // Writing to a string cannot fail.
            let _ = write!(rendered, "{separator}{name}=\"{value}\"");
        }
        let mut registry = registry();
        registry.next_number += 1;
        Self { labels: rendered, number: registry.next_number }
    }

    /// A gauge of the set, 0 at first.
    pub fn gauge(&self, name: &'static str) -> Gauge {
        Gauge::from_arc(self.add(name, Kind::Gauge))
    }

    /// A counter of the set.
    pub fn counter(&self, name: &'static str) -> Counter {
        Counter::from_arc(self.add(name, Kind::Counter))
    }

    fn add(&self, name: &'static str, kind: Kind) -> Arc<AtomicU64> {
        let cell = Arc::new(AtomicU64::new(0));
        let mut registry = registry();
        let family = registry.families.entry(name).or_insert(Family { kind, series: BTreeMap::new() });
        family.series.insert((self.labels.clone(), self.number), Arc::clone(&cell));
        cell
    }
}

impl Drop for MetricSet {
    fn drop(&mut self) {
        let key = (std::mem::take(&mut self.labels), self.number);
        registry().families.retain(|_, family| {
            family.series.remove(&key);
            !family.series.is_empty()
        });
    }
}

/// Appends all sets in Prometheus' text format.
pub(super) fn render(text: &mut String) {
    for (name, family) in &registry().families {
        let kind = match family.kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
        };
        let _ = writeln!(text, "# TYPE {name} {kind}");
        let mut series = family.series.iter().peekable();
        while let Some(((labels, _), cell)) = series.next() {
            if series.peek().is_some_and(|((next, _), _)| next == labels) {
                continue;
            }
            // Relaxed: a metric orders nothing.
            let bits = cell.load(Ordering::Relaxed);
            let _ = match family.kind {
                Kind::Gauge => writeln!(text, "{name}{{{labels}}} {}", f64::from_bits(bits)),
                Kind::Counter => writeln!(text, "{name}{{{labels}}} {bits}"),
            };
        }
        text.push('\n');
    }
}

fn registry() -> MutexGuard<'static, Registry> {
    // A panic elsewhere leaves the maps as they are.
    REGISTRY.lock()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(part: &str) -> Vec<String> {
        let mut text = String::new();
        render(&mut text);
        text.lines().filter(|line| line.contains(part)).map(str::to_owned).collect()
    }

    #[test]
    fn a_set_is_shown_while_it_exists_and_the_later_of_two_with_the_same_labels() {
        let first = MetricSet::new(&[("worker", "a\"\\\n"), ("rank", "0")]);
        let (state, total) = (first.gauge("series_test_state"), first.counter("series_test_total"));
        state.set(2.5);
        total.increment(3);
        let labels = r#"{worker="a\"\\\n",rank="0"}"#;
        let expected = [
            "# TYPE series_test_state gauge".to_owned(),
            format!("series_test_state{labels} 2.5"),
            "# TYPE series_test_total counter".to_owned(),
            format!("series_test_total{labels} 3"),
        ];
        assert_eq!(lines("series_test"), expected);
        let second = MetricSet::new(&[("worker", "a\"\\\n"), ("rank", "0")]);
        second.gauge("series_test_state").increment(1.0);
        assert_eq!(lines("series_test_state{"), [format!("series_test_state{labels} 1")]);
        drop(second);
        assert_eq!(lines("series_test_state{"), [format!("series_test_state{labels} 2.5")]);
        drop(first);
        assert!(lines("series_test").is_empty());
    }
}
