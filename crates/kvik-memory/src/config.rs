//! The settings of memory, as an engine's environment has them.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::MemoryError;
use crate::geometry::UNIT_BYTES;
use crate::region::Guard;

/// The longest name of a group, in bytes.
const MAX_IPC_NAME_BYTES: usize = 64;

/// The settings of memory.
///
/// Each has a name of kvik's own, which wins, and the one that existing deployments use:
///
/// | `KVIK_MEMORY_...` | other name | default | allowed |
/// |---|---|---|---|
/// | `ENABLED` | `ENABLE_KVCACHED` | `false` | `true`, `false`, `1`, `0`, `yes`, `no`, `on`, `off` |
/// | `IPC_NAME` | `KVCACHED_IPC_NAME` | `kvcached_<engine>_<process group>` | see [`ipc_name`](Self::ipc_name) |
/// | `PAGE_SIZE_MB` | `KVCACHED_PAGE_SIZE_MB` | `2` | a multiple of 2, up to 1048576 |
/// | `GPU_UTILIZATION` | `KVCACHED_GPU_UTILIZATION` | `0.95` | above 0, up to 1 |
/// | `PAGE_PREALLOC_ENABLED` | `KVCACHED_PAGE_PREALLOC_ENABLED` | `true` | as `ENABLED` |
/// | `MIN_RESERVED_PAGES` | `KVCACHED_MIN_RESERVED_PAGES` | `5` | 0 or more, up to the maximum |
/// | `MAX_RESERVED_PAGES` | `KVCACHED_MAX_RESERVED_PAGES` | `10` | 0 or more |
/// | `CONTIGUOUS_LAYOUT` | `KVCACHED_CONTIGUOUS_LAYOUT` | `false` | as `ENABLED` |
/// | `MAX_CACHED_TOKENS` | `KVCACHED_MAX_CACHED_TOKENS` | `16000` | a whole number; below 0: no bound |
/// | `SANITY_CHECK` | `KVCACHED_SANITY_CHECK` | `false` | as `ENABLED`; kvik checks in any case |
/// | `IPC_TIMEOUT` | `KVCACHED_IPC_TIMEOUT` | `60` | seconds; 0 or below: no bound |
/// | `PP_SIZE` | `KVCACHED_PP_SIZE` | `1` | 1 to 65536 |
/// | `LOG_LEVEL` | `KVCACHED_LOG_LEVEL` | `info` | `trace`, `debug`, `info`, `warning`, `error`, `critical` |
/// | `DIR` | | `/dev/shm` | a folder |
/// | `GUARD` | | `zero` | `zero`, `none` |
/// | `TRIM_AFTER` | | `1` | seconds, 0 or more |
/// | `BYPASS` | | `false` | as `ENABLED`; allocations of the C library come from the device's own allocator |
///
/// `KVCACHED_MAX_CACHED_BLOCKS` is accepted and means nothing, as it did before. Empty values count as not
/// set.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a variable of its own")]
pub struct MemoryConfig {
    /// Whether an engine that has a memory of its own uses this one.
    pub is_enabled: bool,
    /// The group; `None` for [`default_ipc_name`].
    ///
    /// Characters other than letters, digits, `_` and `-` were replaced by `_`, and what is beyond 64 cut.
    pub ipc_name: Option<String>,
    /// Bytes of a page in one buffer.
    pub page_bytes: u64,
    /// The part of the device that engines may use together.
    pub device_utilization: f64,
    /// Whether the agent keeps pages ready.
    pub is_preallocating: bool,
    /// Parked pages that are kept ready.
    pub low_watermark_pages: u32,
    /// Parked pages above which the agent trims.
    pub high_watermark_pages: u32,
    /// Whether all layers share one buffer.
    ///
    /// Not by default: attention then reads blocks that lie a page apart, which costs more than the
    /// mapping saves.
    pub is_contiguous: bool,
    /// Tokens that a prefix cache may keep beyond what is used; `None` without bound.
    pub max_cached_tokens: Option<u64>,
    /// Whether frees are to be checked; they always are.
    pub is_checking: bool,
    /// How long one exchange with a rank may take; `None` without bound.
    pub rank_timeout: Option<Duration>,
    /// Processes of a pipeline.
    pub n_pipeline_ranks: u32,
    /// What is logged.
    pub log_level: LogLevel,
    /// Where the files of the ledger are.
    pub dir: PathBuf,
    /// What lies behind unmapped pages.
    pub guard: Guard,
    /// How long pages above the high watermark lie idle before they are trimmed.
    pub trim_after: Duration,
    /// Whether allocations of any size come from the device's own allocator, without a grant.
    pub is_bypassed: bool,
}

/// Which log lines are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Everything.
    Trace,
    /// What helps to find a defect.
    Debug,
    /// What an operator wants to find later.
    Info,
    /// What is unexpected.
    Warn,
    /// What needs a human.
    Error,
}

/// Everything that is wrong with the settings.
#[derive(Debug)]
pub struct ConfigErrors(Vec<MemoryError>);

/// Reads variables one after the other and collects what is wrong with them.
struct Reader<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
    errors: Vec<MemoryError>,
}

/// The name of an engine's group where none is set.
pub fn default_ipc_name(engine: &str, process_group: u32) -> String {
    sanitized(&format!("kvcached_{engine}_{process_group}"))
}

fn sanitized(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' };
    name.chars().map(plain).take(MAX_IPC_NAME_BYTES).collect()
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            is_enabled: false,
            ipc_name: None,
            page_bytes: UNIT_BYTES,
            device_utilization: 0.95,
            is_preallocating: true,
            low_watermark_pages: 5,
            high_watermark_pages: 10,
            is_contiguous: false,
            max_cached_tokens: Some(16_000),
            is_checking: false,
            rank_timeout: Some(Duration::from_mins(1)),
            n_pipeline_ranks: 1,
            log_level: LogLevel::Info,
            dir: PathBuf::from("/dev/shm"),
            guard: Guard::Zero,
            trim_after: Duration::from_secs(1),
            is_bypassed: false,
        }
    }
}

impl MemoryConfig {
    /// Reads the settings; `lookup` gives the value of a variable.
    ///
    /// Fails with everything that is wrong, not only the first.
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self, ConfigErrors> {
        let default = Self::default();
        let mut reader = Reader { lookup, errors: Vec::new() };
        let is_yes = |value: &str| match value.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Some(true),
            "false" | "0" | "no" | "off" => Some(false),
            _ => None,
        };
        let yes_or_no = "true, false, 1, 0, yes, no, on or off";
        let config = Self {
            is_enabled: reader
                .read(["KVIK_MEMORY_ENABLED", "ENABLE_KVCACHED"], yes_or_no, is_yes)
                .unwrap_or(default.is_enabled),
            ipc_name: reader.read(
                ["KVIK_MEMORY_IPC_NAME", "KVCACHED_IPC_NAME"],
                "a name that, with all but letters, digits, `_` and `-` replaced by `_`, does not end in `_lock` \
                 or `_page_<number>`",
                ipc_name,
            ),
            page_bytes: reader
                .read(
                    ["KVIK_MEMORY_PAGE_SIZE_MB", "KVCACHED_PAGE_SIZE_MB"],
                    "a multiple of 2, from 2 to 1048576",
                    page_bytes,
                )
                .unwrap_or(default.page_bytes),
            device_utilization: reader
                .read(["KVIK_MEMORY_GPU_UTILIZATION", "KVCACHED_GPU_UTILIZATION"], "above 0, up to 1", |value| {
                    number(value).filter(|part: &f64| *part > 0.0 && *part <= 1.0)
                })
                .unwrap_or(default.device_utilization),
            is_preallocating: reader
                .read(
                    ["KVIK_MEMORY_PAGE_PREALLOC_ENABLED", "KVCACHED_PAGE_PREALLOC_ENABLED"],
                    yes_or_no,
                    is_yes,
                )
                .unwrap_or(default.is_preallocating),
            low_watermark_pages: reader
                .read(
                    ["KVIK_MEMORY_MIN_RESERVED_PAGES", "KVCACHED_MIN_RESERVED_PAGES"],
                    "a whole number, 0 or more",
                    number,
                )
                .unwrap_or(default.low_watermark_pages),
            high_watermark_pages: reader
                .read(
                    ["KVIK_MEMORY_MAX_RESERVED_PAGES", "KVCACHED_MAX_RESERVED_PAGES"],
                    "a whole number, 0 or more",
                    number,
                )
                .unwrap_or(default.high_watermark_pages),
            is_contiguous: reader
                .read(["KVIK_MEMORY_CONTIGUOUS_LAYOUT", "KVCACHED_CONTIGUOUS_LAYOUT"], yes_or_no, is_yes)
                .unwrap_or(default.is_contiguous),
            max_cached_tokens: reader
                .read(
                    ["KVIK_MEMORY_MAX_CACHED_TOKENS", "KVCACHED_MAX_CACHED_TOKENS"],
                    "a whole number; below 0 means no bound",
                    |value| number(value).map(|n_tokens: i64| u64::try_from(n_tokens).ok()),
                )
                .unwrap_or(default.max_cached_tokens),
            is_checking: reader
                .read(["KVIK_MEMORY_SANITY_CHECK", "KVCACHED_SANITY_CHECK"], yes_or_no, is_yes)
                .unwrap_or(default.is_checking),
            rank_timeout: reader
                .read(
                    ["KVIK_MEMORY_IPC_TIMEOUT", "KVCACHED_IPC_TIMEOUT"],
                    "seconds; 0 or below means no bound",
                    |value| {
                        let n_seconds: f64 = number(value)?;
                        let is_bounded = n_seconds > 0.0 || n_seconds.is_nan();
                        is_bounded.then(|| Duration::try_from_secs_f64(n_seconds)).transpose().ok()
                    },
                )
                .unwrap_or(default.rank_timeout),
            n_pipeline_ranks: reader
                .read(["KVIK_MEMORY_PP_SIZE", "KVCACHED_PP_SIZE"], "1 to 65536", |value| {
                    number(value).filter(|n_ranks| (1..=65_536).contains(n_ranks))
                })
                .unwrap_or(default.n_pipeline_ranks),
            log_level: reader
                .read(
                    ["KVIK_MEMORY_LOG_LEVEL", "KVCACHED_LOG_LEVEL"],
                    "trace, debug, info, warning, error or critical",
                    |value| value.parse().ok(),
                )
                .unwrap_or(default.log_level),
            dir: reader.read(["KVIK_MEMORY_DIR"], "a folder", |value| Some(value.into())).unwrap_or(default.dir),
            guard: reader
                .read(["KVIK_MEMORY_GUARD"], "zero or none", |value| match value {
                    "zero" => Some(Guard::Zero),
                    "none" => Some(Guard::None),
                    _ => None,
                })
                .unwrap_or(default.guard),
            trim_after: reader
                .read(["KVIK_MEMORY_TRIM_AFTER"], "seconds, 0 or more", |value| {
                    Duration::try_from_secs_f64(number(value)?).ok()
                })
                .unwrap_or(default.trim_after),
            is_bypassed: reader
                .read(["KVIK_MEMORY_BYPASS"], yes_or_no, is_yes)
                .unwrap_or(default.is_bypassed),
        };
        reader.check_watermarks(&config);
        if reader.errors.is_empty() { Ok(config) } else { Err(ConfigErrors(reader.errors)) }
    }
}

fn ipc_name(value: &str) -> Option<String> {
    let name = sanitized(value);
    let ends_like_page_file = name
        .rsplit_once("_page_")
        .is_some_and(|(_, number)| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()));
    (!name.ends_with("_lock") && !ends_like_page_file).then_some(name)
}

fn page_bytes(value: &str) -> Option<u64> {
    let n_mib: u64 = number(value)?;
    (n_mib.is_multiple_of(2) && (2..=1 << 20).contains(&n_mib)).then_some(n_mib << 20)
}

fn number<N: FromStr>(value: &str) -> Option<N> {
    value.parse().ok()
}

impl Reader<'_> {
    /// The first variable of `names` that is set, parsed.
    fn read<T, const N: usize>(
        &mut self,
        names: [&'static str; N],
        allowed: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let (name, value) = self.find(&names)?;
        let parsed = parse(&value);
        if parsed.is_none() {
            self.errors.push(MemoryError::Invalid {
                field: name,
                value: format!("{value:?}"),
                allowed: allowed.to_owned(),
            });
        }
        parsed
    }

    fn find(&self, names: &[&'static str]) -> Option<(&'static str, String)> {
        names.iter().find_map(|name| {
            let value = (self.lookup)(name)?;
            let value = value.trim();
            (!value.is_empty()).then(|| (*name, value.to_owned()))
        })
    }

    /// Compares the watermarks, and blames the one that was set.
    fn check_watermarks(&mut self, config: &MemoryConfig) {
        let (low, high) = (config.low_watermark_pages, config.high_watermark_pages);
        if low <= high {
            return;
        }
        let low_names = ["KVIK_MEMORY_MIN_RESERVED_PAGES", "KVCACHED_MIN_RESERVED_PAGES"];
        let high_names = ["KVIK_MEMORY_MAX_RESERVED_PAGES", "KVCACHED_MAX_RESERVED_PAGES"];
        let error = match (self.find(&low_names), self.find(&high_names)) {
            (Some((field, value)), _) => MemoryError::Invalid {
                field,
                value: format!("{value:?}"),
                allowed: format!("up to the maximum of reserved pages, which is {high}"),
            },
            (None, Some((field, value))) => MemoryError::Invalid {
                field,
                value: format!("{value:?}"),
                allowed: format!("the minimum of reserved pages or more, which is {low}"),
            },
            (None, None) => return,
        };
        self.errors.push(error);
    }
}

impl FromStr for LogLevel {
    type Err = ();

    fn from_str(level: &str) -> Result<Self, ()> {
        match level.to_ascii_lowercase().as_str() {
            "trace" => Ok(Self::Trace),
            "debug" => Ok(Self::Debug),
            "info" => Ok(Self::Info),
            "warn" | "warning" => Ok(Self::Warn),
            "error" | "critical" => Ok(Self::Error),
            _ => Err(()),
        }
    }
}

impl ConfigErrors {
    /// One error for each variable at fault, in the order of the table.
    pub fn errors(&self) -> &[MemoryError] {
        &self.0
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (idx, error) in self.0.iter().enumerate() {
            let separator = if idx == 0 { "" } else { "; " };
            write!(formatter, "{separator}{error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}
