//! What each variable of the environment means for the memory.

use std::path::PathBuf;
use std::time::Duration;

use kvik_memory::config::{ConfigErrors, LogLevel, MemoryConfig, default_ipc_name};
use kvik_memory::region::Guard;

fn read(variables: &[(&str, &str)]) -> Result<MemoryConfig, ConfigErrors> {
    MemoryConfig::from_lookup(&|name| {
        variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    })
}

#[test]
fn nothing_set_means_the_defaults() {
    assert_eq!(read(&[]).unwrap(), MemoryConfig::default());
    assert_eq!(
        read(&[("KVCACHED_PAGE_SIZE_MB", " "), ("ENABLE_KVCACHED", "")]).unwrap(),
        MemoryConfig::default()
    );
}

#[test]
fn every_known_variable_is_honored() {
    let config = read(&[
        ("ENABLE_KVCACHED", "1"),
        ("KVCACHED_IPC_NAME", "my/pool name"),
        ("KVCACHED_PAGE_SIZE_MB", "64"),
        ("KVCACHED_GPU_UTILIZATION", "0.5"),
        ("KVCACHED_PAGE_PREALLOC_ENABLED", "False"),
        ("KVCACHED_MIN_RESERVED_PAGES", "0"),
        ("KVCACHED_MAX_RESERVED_PAGES", "3"),
        ("KVCACHED_CONTIGUOUS_LAYOUT", "true"),
        ("KVCACHED_MAX_CACHED_TOKENS", "-1"),
        ("KVCACHED_MAX_CACHED_BLOCKS", "anything"),
        ("KVCACHED_SANITY_CHECK", "on"),
        ("KVCACHED_IPC_TIMEOUT", "0"),
        ("KVCACHED_PP_SIZE", "4"),
        ("KVCACHED_LOG_LEVEL", "WARNING"),
        ("KVIK_MEMORY_DIR", "/tmp/ledgers"),
        ("KVIK_MEMORY_GUARD", "none"),
        ("KVIK_MEMORY_TRIM_AFTER", "0.25"),
        ("KVIK_MEMORY_BYPASS", "yes"),
    ])
    .unwrap();
    let expected = MemoryConfig {
        is_enabled: true,
        ipc_name: Some("my_pool_name".to_owned()),
        page_bytes: 64 << 20,
        device_utilization: 0.5,
        is_preallocating: false,
        low_watermark_pages: 0,
        high_watermark_pages: 3,
        is_contiguous: true,
        max_cached_tokens: None,
        is_checking: true,
        rank_timeout: None,
        n_pipeline_ranks: 4,
        log_level: LogLevel::Warn,
        dir: PathBuf::from("/tmp/ledgers"),
        guard: Guard::None,
        trim_after: Duration::from_millis(250),
        is_bypassed: true,
    };
    assert_eq!(config, expected);
}

#[test]
fn names_of_kvik_win() {
    let config = read(&[
        ("KVIK_MEMORY_PAGE_SIZE_MB", "4"),
        ("KVCACHED_PAGE_SIZE_MB", "garbage"),
        ("KVIK_MEMORY_ENABLED", "no"),
        ("ENABLE_KVCACHED", "true"),
    ])
    .unwrap();
    assert_eq!((config.page_bytes, config.is_enabled), (4 << 20, false));
}

#[test]
fn all_errors_are_told_at_once_with_variable_value_and_what_is_allowed() {
    let errors = read(&[
        ("KVCACHED_PAGE_SIZE_MB", "3"),
        ("KVCACHED_GPU_UTILIZATION", "garbage"),
        ("KVCACHED_PAGE_PREALLOC_ENABLED", "maybe"),
        ("KVIK_MEMORY_IPC_NAME", "pool_lock"),
        ("KVCACHED_PP_SIZE", "0"),
        ("KVCACHED_MIN_RESERVED_PAGES", "11"),
    ])
    .unwrap_err();
    assert_eq!(errors.errors().len(), 6, "{errors}");
    let text = errors.to_string();
    for part in [
        "`KVCACHED_PAGE_SIZE_MB` is \"3\"; allowed: a multiple of 2",
        "`KVCACHED_GPU_UTILIZATION` is \"garbage\"; allowed: above 0",
        "`KVCACHED_PAGE_PREALLOC_ENABLED` is \"maybe\"; allowed: true, false",
        "`KVIK_MEMORY_IPC_NAME` is \"pool_lock\"",
        "`KVCACHED_PP_SIZE` is \"0\"; allowed: 1 to 65536",
        "`KVCACHED_MIN_RESERVED_PAGES` is \"11\"; allowed: up to the maximum of reserved pages, which is 10",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

#[test]
fn numbers_that_no_size_can_be_are_refused() {
    for (name, value) in [
        ("KVCACHED_PAGE_SIZE_MB", "0"),
        ("KVCACHED_PAGE_SIZE_MB", "18446744073709551615"),
        ("KVCACHED_GPU_UTILIZATION", "NaN"),
        ("KVCACHED_GPU_UTILIZATION", "1.01"),
        ("KVCACHED_IPC_TIMEOUT", "1e300"),
        ("KVCACHED_IPC_TIMEOUT", "NaN"),
        ("KVIK_MEMORY_TRIM_AFTER", "-1"),
        ("KVCACHED_MIN_RESERVED_PAGES", "-1"),
        ("KVCACHED_MAX_RESERVED_PAGES", "4"),
    ] {
        let errors = read(&[(name, value)]).unwrap_err();
        assert!(errors.to_string().contains(name), "{errors}");
    }
}

#[test]
fn a_name_becomes_a_file_name() {
    let long = "x".repeat(100);
    let name = read(&[("KVCACHED_IPC_NAME", &long)]).unwrap().ipc_name;
    assert_eq!(name.unwrap().len(), 64);
    assert_eq!(default_ipc_name("vLLM", 4_711), "kvcached_vLLM_4711");
    assert_eq!(default_ipc_name("../x", 1), "kvcached____x_1");
    assert!(read(&[("KVCACHED_IPC_NAME", "a_page_0")]).is_err());
    assert!(read(&[("KVCACHED_IPC_NAME", "a_page_")]).is_ok());
}
