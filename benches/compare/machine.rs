//! The machine that figures come from; each comparison takes this file in by its path.

use std::fs;

use serde_json::{Value, json};

/// What a report says of the machine; `load_averages` are those of the begin and of the end.
pub fn to_json(load_averages: &[String; 2]) -> Value {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown");
    json!({
        "cpu": cpu.trim_matches([' ', '\t', ':']),
        "cores": std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        "load_average_begin": load_averages[0],
        "load_average_end": load_averages[1],
    })
}

/// What waits for the processors, over the last minute.
pub fn load_average() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().unwrap_or("unknown").to_owned()
}
