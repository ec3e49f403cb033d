//! Addresses that may carry a login.

mod redis;

pub use redis::{RedisEndpoint, RedisUrl, RedisUrlError};

/// What is printed in place of a secret.
pub const HIDDEN: &str = "(hidden)";

/// `text` as it can be printed: logins and parameters of an address are replaced by [`HIDDEN`].
///
/// What cannot be told apart from a login is hidden too: everything up to the last `@`, and everything after the
/// scheme if a `?` or `#` comes before that `@`. Text that is no address and has none of these is returned as it is.
///
/// ```
/// use kvik_types::redacted_url;
///
/// assert_eq!(redacted_url("redis://me:a/b@c@host:6379/2"), "redis://(hidden)@host:6379/2");
/// assert_eq!(redacted_url("unix:///run/redis.sock?db=1&pass=x"), "unix:///run/redis.sock?db=1&pass=(hidden)");
/// assert_eq!(redacted_url("http://host:8080"), "http://host:8080");
/// ```
pub fn redacted_url(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://").filter(|(scheme, _)| is_scheme(scheme)) else {
        return if text.contains(['@', '?']) { HIDDEN.to_owned() } else { text.to_owned() };
    };
    let is_path = rest.starts_with('/') && (scheme.ends_with("unix") || scheme == "file");
    let query = rest.find(['?', '#']);
    let login_end = if is_path { None } else { rest.rfind('@') };
    match (login_end, query) {
        (Some(end), Some(query)) if query < end => format!("{scheme}://{HIDDEN}"),
        (Some(end), None) => format!("{scheme}://{HIDDEN}{}", &rest[end..]),
        (None, None) => text.to_owned(),
        (login_end, Some(query)) => {
            let login = if login_end.is_some() { HIDDEN } else { "" };
            let address = &rest[login_end.unwrap_or(0)..query];
            let (mark, parameters) = rest[query..].split_at(1);
            format!("{scheme}://{login}{address}{mark}{}", redacted_parameters(parameters))
        }
    }
}

/// Parameters without their values; the number of a database is none that must be hidden.
fn redacted_parameters(parameters: &str) -> String {
    let shown = parameters.split('&').map(|parameter| match parameter.split_once('=') {
        Some(("db", number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => parameter.to_owned(),
        Some((name, _)) if name.bytes().all(|byte| byte.is_ascii_lowercase()) => format!("{name}={HIDDEN}"),
        _ => HIDDEN.to_owned(),
    });
    shown.collect::<Vec<_>>().join("&")
}

fn is_scheme(text: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    (1..=32).contains(&text.len()) && text.bytes().all(is_letter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_form_of_a_login_is_printed() {
        for text in [
            "redis://u:canary@h:1/0",
            "redis://:canary@h",
            "redis://canary@h",
            "redis://u:x@canary@h",
            "redis://u:x/canary@h/0",
            "redis://u:x?canary@h",
            "redis://u:x#canary@h/0",
            "redis+cluster://u:canary@a,u:canary@b",
            "redis:///u:canary@h",
            "redis://h/0?password=canary",
            "redis://h/0?password=x@canary",
            "unix:///run/s?pass=canary",
            "unix:///run/s?pass=x@canary",
            "unix:///run/s?db=1&pass=x&canary",
            "unix:///run/s?db=canary",
            "unix://u:canary@/run/s?db=1",
            "s3://key:canary@bucket/prefix",
            "https://h/path#canary",
            "u:canary@h",
            "canary?://x@h",
            "h?canary",
        ] {
            let shown = redacted_url(text);
            assert!(!shown.contains("canary"), "{shown}");
            assert!(shown.contains(HIDDEN), "{shown}");
        }
    }

    #[test]
    fn what_has_no_login_is_shown_whole() {
        for text in
            ["memory", "redis://h:1/2", "s3://bucket/a/b", "unix:///run/a@b.sock?db=3", "http://[::1]:80"]
        {
            assert_eq!(redacted_url(text), text);
        }
    }
}
