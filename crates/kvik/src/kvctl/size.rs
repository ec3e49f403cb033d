//! Sizes, limits and percentages as people write and read them.

use kvik_types::ByteSize;

const ALLOWED_SIZE: &str = "a number with b, k, kb, kib, m, mb, mib, g, gb, gib, t, tb or tib (powers of \
                            1024), such as `2G`, `1.5 GiB`, `1,024mb`";

const UNIT_NAMES: [&str; 5] = ["B", "KB", "MB", "GB", "TB"];

/// A limit as it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    /// As much as the device has.
    None,
    /// So many bytes.
    Bytes(u64),
}

impl Limit {
    /// The limit as the ledger takes it.
    pub(crate) fn bytes(self) -> Option<u64> {
        match self {
            Self::None => None,
            Self::Bytes(n_bytes) => Some(n_bytes),
        }
    }
}

/// Reads a size; every unit is a power of 1024, as in what is printed.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let refusal = || format!("`{text}` is no size; allowed: {ALLOWED_SIZE}");
    let trimmed = text.trim();
    let unit_start = trimmed.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(unit_start);
    let number = without_separators(number.trim_end()).ok_or_else(refusal)?;
    let unit = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => "B",
        "k" | "kb" | "kib" => "KiB",
        "m" | "mb" | "mib" => "MiB",
        "g" | "gb" | "gib" => "GiB",
        "t" | "tb" | "tib" => "TiB",
        _ => return Err(refusal()),
    };
    format!("{number}{unit}").parse::<ByteSize>().map(ByteSize::bytes).map_err(|_| refusal())
}

/// Reads a size or `none`.
pub(crate) fn parse_limit(text: &str) -> Result<Limit, String> {
    if text.trim().eq_ignore_ascii_case("none") {
        return Ok(Limit::None);
    }
    parse_size(text).map(Limit::Bytes).map_err(|message| format!("{message}, or `none`"))
}

/// Reads a percentage from 0 to 100, with or without its sign.
pub(crate) fn parse_percent(text: &str) -> Result<f64, String> {
    let number = text.trim().trim_end_matches('%').trim_end();
    match number.parse::<f64>() {
        Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(percent),
        _ => Err(format!("`{text}` is no percentage; allowed: 0 to 100")),
    }
}

/// Reads a number of seconds between two looks.
pub(crate) fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("`{text}` is no number of seconds; allowed: 0.1 to 3600")),
    }
}

/// A size with two decimals: `2.50 GB`.
pub(crate) fn long(n_bytes: u64) -> String {
    let (value, unit) = scaled(n_bytes, 1024.0 - 0.005);
    format!("{value:.2} {}", UNIT_NAMES[unit])
}

/// A size in at most five characters: `2.50G`, `999M`.
pub(crate) fn compact(n_bytes: u64) -> String {
    let (value, unit) = scaled(n_bytes, 999.5);
    let name = UNIT_NAMES[unit].as_bytes()[0] as char;
    let n_decimals = match value {
        _ if unit == 0 => 0,
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.n_decimals$}{name}")
}

/// Percent of `limit_bytes`; `None` if nothing is allowed at all.
pub(crate) fn percent(n_bytes: u64, limit_bytes: u64) -> Option<f64> {
    (limit_bytes > 0).then(|| n_bytes as f64 / limit_bytes as f64 * 100.0)
}

/// The value in the smallest unit in which it is below `limit`, and that unit.
fn scaled(n_bytes: u64, limit: f64) -> (f64, usize) {
    let mut value = n_bytes as f64;
    let mut unit = 0;
    while value >= limit && unit + 1 < UNIT_NAMES.len() {
        value /= 1024.0;
        unit += 1;
    }
    (value, unit)
}

/// The number without `_` and `,`; a comma must stand before three digits, or it is a decimal one.
fn without_separators(number: &str) -> Option<String> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let mut groups = whole.split(',');
    let first = groups.next()?.replace('_', "");
    let mut digits = first.clone();
    for group in groups {
        if first.is_empty() || group.len() != 3 {
            return None;
        }
        digits.push_str(group);
    }
    Some(format!("{digits}.{}", fraction.replace('_', "")))
}
