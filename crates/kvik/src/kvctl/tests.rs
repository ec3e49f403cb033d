use super::shell::{completions, split_words};
use super::size::{Limit, compact, long, parse_limit, parse_percent, parse_seconds, parse_size};

#[test]
fn sizes_are_read_in_powers_of_1024_in_any_case_with_separators() {
    for (text, n_bytes) in [
        ("0", 0),
        ("1024", 1024),
        ("1,024", 1024),
        ("1_024b", 1024),
        ("2k", 2 << 10),
        ("2KB", 2 << 10),
        ("2KiB", 2 << 10),
        ("512m", 512 << 20),
        ("1,536MB", 1536 << 20),
        (" 2 GB ", 2 << 30),
        ("1.5g", 3 << 29),
        ("1TiB", 1 << 40),
        ("12,345,678", 12_345_678),
    ] {
        assert_eq!(parse_size(text), Ok(n_bytes), "{text}");
    }
}

#[test]
fn what_is_no_size_is_refused_by_name() {
    for text in ["", "G", "-1", "1,5g", "1,0000", ",100", "2x", "1e3", "1..5", "99999999999t", "\u{ff11}"] {
        let message = parse_size(text).unwrap_err();
        assert!(message.contains(&format!("`{text}`")) && message.contains("allowed"), "{message}");
    }
}

#[test]
fn a_limit_can_be_none() {
    assert_eq!(parse_limit("None"), Ok(Limit::None));
    assert_eq!(parse_limit("1k"), Ok(Limit::Bytes(1024)));
    assert!(parse_limit("some").unwrap_err().contains("`none`"));
}

#[test]
fn percentages_and_seconds_stay_in_their_ranges() {
    assert_eq!(parse_percent("37.5"), Ok(37.5));
    assert_eq!(parse_percent("100 %"), Ok(100.0));
    for text in ["-1", "100.1", "NaN", "inf", "half", ""] {
        assert!(parse_percent(text).is_err(), "{text}");
    }
    assert_eq!(parse_seconds("0.1"), Ok(0.1));
    for text in ["0", "NaN", "3601", "-1", "soon"] {
        assert!(parse_seconds(text).is_err(), "{text}");
    }
}

#[test]
fn sizes_are_printed_as_the_table_has_them() {
    for (n_bytes, text, short) in [
        (0, "0.00 B", "0B"),
        (1023, "1023.00 B", "1.00K"),
        (5 << 29, "2.50 GB", "2.50G"),
        (8 << 30, "8.00 GB", "8.00G"),
        ((1 << 30) - 1, "1.00 GB", "1.00G"),
        (999 << 20, "999.00 MB", "999M"),
        (1000 << 20, "1000.00 MB", "0.98G"),
        (u64::MAX, "16777216.00 TB", "16777216T"),
    ] {
        assert_eq!((long(n_bytes).as_str(), compact(n_bytes).as_str()), (text, short));
    }
}

#[test]
fn a_line_is_split_at_spaces_outside_of_quotes() {
    assert_eq!(split_words("  limit a \"2 GB\"  ").unwrap(), ["limit", "a", "2 GB"]);
    assert_eq!(split_words("a '' b'c d'").unwrap(), ["a", "", "bc d"]);
    assert!(split_words("limit \"a").unwrap_err().to_string().contains("not closed"));
}

#[test]
fn verbs_names_and_options_are_completed() {
    let names = || vec!["vllm_b".to_owned(), "vllm_a".to_owned(), "sglang".to_owned()];
    assert_eq!(completions("li", names), (0, vec!["limit".into(), "limit-percent".into(), "list".into()]));
    assert_eq!(completions("limit vl", names), (6, vec!["vllm_a".into(), "vllm_b".into()]));
    assert_eq!(completions("limit vllm_a 1", names), (13, vec![]));
    assert_eq!(completions("list vllm_a s", names), (12, vec!["sglang".into()]));
    assert_eq!(completions("policy vllm_a --we", names), (14, vec!["--weight".into()]));
    assert_eq!(completions("help tr", names), (5, vec!["trim".into()]));
    assert_eq!(completions("!l", names), (0, vec![]));
}
