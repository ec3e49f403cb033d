//! Prometheus' text format, as far as figures are read from it.

use std::borrow::Cow;

/// A value of a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sample<'a> {
    pub(super) name: &'a str,
    /// What stands between the braces.
    labels: &'a str,
    pub(super) value: f64,
}

/// The samples of a text; lines that are none are passed over.
pub(super) fn samples(text: &str) -> impl Iterator<Item = Sample<'_>> {
    text.lines().filter_map(sample)
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let name_end = line.find(|c: char| c == '{' || c.is_ascii_whitespace())?;
    let (name, rest) = line.split_at(name_end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => {
            let end = labels_end(inside)?;
            (&inside[..end], &inside[end + 1..])
        }
        None => ("", rest),
    };
    // A time stamp may follow.
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some(Sample { name, labels, value })
}

/// Where the brace is that closes labels; one in a value does not.
fn labels_end(inside: &str) -> Option<usize> {
    let (mut is_quoted, mut is_escaped) = (false, false);
    inside.bytes().position(|byte| {
        let is_end = byte == b'}' && !is_quoted;
        if byte == b'"' && !is_escaped {
            is_quoted = !is_quoted;
        }
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    })
}

impl<'a> Sample<'a> {
    /// The value of a label.
    pub(super) fn label(&self, wanted: &str) -> Option<Cow<'a, str>> {
        let mut rest = self.labels;
        loop {
            let (name, after) = rest.split_once("=\"")?;
            let end = value_end(after)?;
            if name.trim_matches([',', ' ']) == wanted {
                let value = &after[..end];
                return Some(if value.contains('\\') { unescaped(value).into() } else { value.into() });
            }
            rest = &after[end + 1..];
        }
    }
}

fn value_end(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    text.bytes().position(|byte| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    })
}

fn unescaped(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        text.extend(match c {
            '\\' => chars.next().map(|escaped| if escaped == 'n' { '\n' } else { escaped }),
            _ => Some(c),
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_labels_and_values_are_read() {
        let text = "# TYPE a counter\na 3\nb{x=\"1\",y=\"t}w, \\\"o\\\\\"} 2.5 1700000000\nc{} NaN\n\nbroken{x=\"1\nd{z=\"q\"} +Inf\n";
        let found: Vec<_> = samples(text).collect();
        assert_eq!(found.iter().map(|sample| sample.name).collect::<Vec<_>>(), ["a", "b", "c", "d"]);
        assert_eq!((found[0].value, found[1].value), (3.0, 2.5));
        assert!(found[2].value.is_nan() && found[3].value.is_infinite());
        assert_eq!(found[1].label("x").as_deref(), Some("1"));
        assert_eq!(found[1].label("y").as_deref(), Some("t}w, \"o\\"));
        assert_eq!((found[1].label("z"), found[0].label("x")), (None, None));
    }

    proptest! {
        #[test]
        fn any_text_is_samples_or_nothing(text in "[a-z{}\"\\\\=, #0-9.\n\u{e9}]{0,80}") {
            for sample in samples(&text) {
                let _ = sample.label("a");
            }
        }

        #[test]
        fn a_label_comes_out_as_it_went_in(value in "[a-z\"\\\\\n{},= ]{0,12}") {
            let escaped = value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
            let line = format!("m{{a=\"{escaped}\",b=\"2\"}} 7");
            let sample = samples(&line).next().unwrap();
            let label = |name| sample.label(name).map(Cow::into_owned);
            prop_assert_eq!(label("a"), Some(value));
            prop_assert_eq!(label("b"), Some("2".to_owned()));
        }
    }
}
