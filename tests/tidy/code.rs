//! Rust text with everything taken out that is not code.
//!
//! This is not a parser. It knows enough of Rust's tokens that a word in a comment, in a string or
//! in a test module is not mistaken for code, and it keeps every line where it was.

/// A line of code that breaks a rule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Hit {
    /// Counted from 1.
    pub(crate) line: usize,
    pub(crate) what: String,
}

/// Returns `source` with comments and the insides of string and character literals blanked.
pub(crate) fn without_comments_and_literals(source: &str) -> String {
    let chars: Vec<char> = source.chars().collect();
    let mut code = String::with_capacity(source.len());
    let mut at = 0;
    while at < chars.len() {
        let end = literal_or_comment_end(&chars, at);
        if end == at {
            code.push(chars[at]);
            at += 1;
        } else {
            code.extend(chars[at..end].iter().map(|&c| if c == '\n' { '\n' } else { ' ' }));
            at = end;
        }
    }
    code
}

/// Splits code into the part that is always compiled and the insides of its `#[cfg(test)]` modules,
/// each with the other blanked.
pub(crate) fn split_test_modules(code: &str) -> (String, String) {
    const MARK: &str = "#[cfg(test)]";
    let (mut shipped, mut tests) = (String::new(), String::new());
    let mut rest = code;
    while let Some(start) = rest.find(MARK) {
        let after_mark = &rest[start + MARK.len()..];
        let body = after_mark
            .find(['{', ';'])
            .filter(|&open| after_mark[open..].starts_with('{') && is_module(&after_mark[..open]));
        let end = start + MARK.len() + body.map_or(0, |open| open + block_length(&after_mark[open..]));
        let (before, module) = (&rest[..start], &rest[start..end]);
        shipped.push_str(before);
        tests.push_str(&blank(before));
        shipped.push_str(&blank(module));
        tests.push_str(module);
        rest = &rest[end..];
    }
    shipped.push_str(rest);
    tests.push_str(&blank(rest));
    (shipped, tests)
}

/// Finds the places where the code names one of `paths` (such as `std::fs`) or anything below it, in
/// full or through the braces of a `use`.
pub(crate) fn find_paths(code: &str, paths: &[&str]) -> Vec<Hit> {
    let mut hits = Vec::new();
    for path in paths {
        hits.extend(find_words(code, path));
    }
    for (start, _) in code.match_indices("use ") {
        let end = code[start..].find(';').map_or(code.len(), |length| start + length);
        let tree: String = code[start + "use ".len()..end].split_whitespace().collect::<Vec<_>>().join(" ");
        if !is_word_start(code, start) || !tree.contains('{') {
            continue;
        }
        for imported in expand_use(&tree) {
            let is_below = |path: &&&str| imported == **path || imported.starts_with(&format!("{path}::"));
            if paths.iter().any(|path| is_below(&path)) {
                hits.push(Hit { line: line_of(code, start), what: imported });
            }
        }
    }
    hits.sort_by_key(|hit| hit.line);
    hits
}

/// Finds the places where `words` stands between two characters that belong to no identifier.
pub(crate) fn find_words(code: &str, words: &str) -> Vec<Hit> {
    code.match_indices(words)
        .filter(|&(start, _)| {
            is_word_start(code, start) && !code[start + words.len()..].starts_with(is_identifier)
        })
        .map(|(start, _)| Hit { line: line_of(code, start), what: words.to_owned() })
        .collect()
}

/// Finds the places where `text` stands, white space aside.
pub(crate) fn find_text(code: &str, text: &str) -> Vec<Hit> {
    let dense: Vec<(usize, char)> = code.char_indices().filter(|(_, c)| !c.is_whitespace()).collect();
    let pattern: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
    dense
        .windows(pattern.len())
        .filter(|window| window.iter().map(|(_, c)| c).eq(&pattern))
        .map(|window| Hit { line: line_of(code, window[0].0), what: text.to_owned() })
        .collect()
}

/// Returns where the comment or literal that starts at `at` ends; `at` itself if none starts there.
fn literal_or_comment_end(chars: &[char], at: usize) -> usize {
    let next = chars.get(at + 1).copied();
    match chars[at] {
        '/' if next == Some('/') => {
            chars[at..].iter().position(|&c| c == '\n').map_or(chars.len(), |n| at + n)
        }
        '/' if next == Some('*') => block_comment_end(chars, at),
        '"' => quoted_end(chars, at, '"'),
        '\'' if next == Some('\\') || (chars.get(at + 2) == Some(&'\'') && next != Some('\'')) => {
            quoted_end(chars, at, '\'')
        }
        'r' if at == 0 || !is_identifier(chars[at - 1]) || is_raw_prefix(chars, at) => {
            raw_string_end(chars, at)
        }
        _ => at,
    }
}

/// Tells whether the `r` at `at` belongs to `br` or `cr`.
fn is_raw_prefix(chars: &[char], at: usize) -> bool {
    matches!(chars[at - 1], 'b' | 'c') && (at == 1 || !is_identifier(chars[at - 2]))
}

fn raw_string_end(chars: &[char], at: usize) -> usize {
    let n_hashes = chars[at + 1..].iter().take_while(|&&c| c == '#').count();
    let open = at + 1 + n_hashes;
    // `r#name` is an identifier.
    if chars.get(open) != Some(&'"') {
        return at;
    }
    let closes = |quote: usize| {
        chars[quote] == '"'
            && chars[quote + 1..].iter().take(n_hashes).filter(|&&c| c == '#').count() == n_hashes
    };
    (open + 1..chars.len()).find(|&quote| closes(quote)).map_or(chars.len(), |quote| quote + 1 + n_hashes)
}

fn quoted_end(chars: &[char], at: usize, quote: char) -> usize {
    let mut end = at + 1;
    while end < chars.len() && chars[end] != quote {
        end += if chars[end] == '\\' { 2 } else { 1 };
    }
    (end + 1).min(chars.len())
}

fn block_comment_end(chars: &[char], at: usize) -> usize {
    let mut depth = 0;
    let mut end = at;
    while end + 1 < chars.len() {
        match (chars[end], chars[end + 1]) {
            ('/', '*') => {
                depth += 1;
                end += 2;
            }
            ('*', '/') => {
                depth -= 1;
                end += 2;
                if depth == 0 {
                    return end;
                }
            }
            _ => end += 1,
        }
    }
    chars.len()
}

/// Tells whether the text between a `#[cfg(test)]` and a brace opens a module.
fn is_module(head: &str) -> bool {
    head.split_whitespace().any(|word| word == "mod")
}

/// Returns the length of the block whose brace is the first byte of `code`.
fn block_length(code: &str) -> usize {
    let mut depth = 0_usize;
    for (at, byte) in code.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
    }
    code.len()
}

/// Returns every path that the tree of a `use` names: `a::{b, c::d}` gives `a::b` and `a::c::d`.
fn expand_use(tree: &str) -> Vec<String> {
    let Some(open) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or_default().trim();
        return vec![path.trim_end_matches("::self").to_owned()];
    };
    let prefix = tree[..open].trim();
    let inside = tree[open + 1..].trim_end().trim_end_matches('}');
    // The group's own brace is not always the last one trimmed: put back what belongs to the inside.
    let n_missing = inside.matches('{').count().saturating_sub(inside.matches('}').count());
    let inside = format!("{inside}{}", "}".repeat(n_missing));
    split_at_top_level(&inside)
        .iter()
        .flat_map(|part| expand_use(&format!("{prefix}{}", part.trim())))
        .collect()
}

fn split_at_top_level(list: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0_usize, 0);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    parts.retain(|part| !part.trim().is_empty());
    parts
}

fn blank(code: &str) -> String {
    code.chars().map(|c| if c == '\n' { '\n' } else { ' ' }).collect()
}

fn is_word_start(code: &str, start: usize) -> bool {
    !code[..start].ends_with(is_identifier)
}

fn is_identifier(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn line_of(code: &str, at: usize) -> usize {
    code[..at].matches('\n').count() + 1
}

#[test]
fn words_in_comments_and_literals_are_not_code() {
    let source = "a // unsafe\n/* unsafe /* */ unsafe */ b \"unsafe \\\" unsafe\" c r#\"unsafe \" unsafe\"# d 'u' '\\'' e";
    let code = without_comments_and_literals(source);
    assert_eq!(code.split_whitespace().collect::<Vec<_>>(), ["a", "b", "c", "d", "e"]);
    assert_eq!(code.lines().count(), source.lines().count());
}

#[test]
fn lifetimes_and_raw_identifiers_are_code() {
    let source = "fn f<'a>(r#type: &'a str, bar: &'static str) {}";
    assert_eq!(without_comments_and_literals(source), source);
}

#[test]
fn byte_and_raw_byte_strings_are_blanked() {
    let code = without_comments_and_literals("x(b\"unsafe\", br\"\\\", cr##\"unsafe\"#\"##) y");
    assert!(find_words(&code, "unsafe").is_empty(), "{code}");
    assert_eq!(find_words(&code, "y").len(), 1, "{code}");
}

#[test]
fn a_test_module_is_split_from_what_ships() {
    let code =
        "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() { {} }\n}\nfn c() {}\n#[cfg(test)]\nmod d;\n";
    let (shipped, tests) = split_test_modules(code);
    assert_eq!(find_words(&shipped, "fn").iter().map(|hit| hit.line).collect::<Vec<_>>(), [1, 6]);
    assert_eq!(find_words(&tests, "fn").iter().map(|hit| hit.line).collect::<Vec<_>>(), [4]);
}

#[test]
fn a_path_is_found_in_full_and_through_braces() {
    let code = "use std::{\n    fmt,\n    fs::{self, File},\n    io,\n};\nlet x = std::fs::read(p);\nuse std::fsx;\nuse a::{b, c};";
    let hits = find_paths(code, &["std::fs"]);
    assert_eq!(
        hits.iter().map(|hit| (hit.line, hit.what.as_str())).collect::<Vec<_>>(),
        [(1, "std::fs"), (1, "std::fs::File"), (6, "std::fs")]
    );
}

#[test]
fn white_space_does_not_hide_text() {
    assert_eq!(find_text("a\n# [ ignore = ]", "#[ignore"), [Hit { line: 2, what: "#[ignore".to_owned() }]);
}
