//! Text in words, as a shell splits it.

/// Splits `text` at white space outside of quotes. Within double quotes and outside of quotes a backslash keeps the next
/// character; nothing is expanded. `None` if a quote is not closed.
pub(super) fn split(text: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote: Option<char> = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None | Some('"'), '\\') => word.get_or_insert_default().extend(chars.next()),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    quote.is_none().then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_as_a_shell_does() {
        for (text, words) in [
            ("", vec![]),
            ("  a  b ", vec!["a", "b"]),
            ("--x 'a b' \"c d\"", vec!["--x", "a b", "c d"]),
            (r#"--json={"a":1}"#, vec!["--json={a:1}"]),
            (r#"'{"a": 1}'"#, vec![r#"{"a": 1}"#]),
            (r#"a\ b "c\"d" ''"#, vec!["a b", "c\"d", ""]),
        ] {
            assert_eq!(split(text).unwrap(), words, "{text}");
        }
        assert_eq!(split("'open"), None);
    }
}
