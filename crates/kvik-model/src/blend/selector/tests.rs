use super::*;

const SEGMENTS: [Range<usize>; 2] = [2..6, 8..18];

fn chosen(text: &str, scores: &[f32]) -> Vec<usize> {
    let tokens: Vec<TokenId> = (0..20).collect();
    let prompt = BlendedPrompt { tokens: &tokens, segments: &SEGMENTS };
    let mut is_selected = vec![false; 20];
    for selector in text.parse::<Selectors>().unwrap().as_slice() {
        selector.select(&prompt, scores, &mut is_selected);
    }
    (0..20).filter(|&position| is_selected[position]).collect()
}

#[test]
fn selectors_choose_tokens_of_segments_alone() {
    let scores: Vec<f32> = (0..20).map(|position| position as f32).collect();
    assert!(chosen("none", &scores).is_empty());
    assert_eq!(chosen("all", &scores), SEGMENTS.into_iter().flatten().collect::<Vec<_>>());
    assert_eq!(chosen("first:2", &scores), [2, 3, 8, 9]);
    assert_eq!(chosen("first:5", &scores), [2, 3, 4, 5, 8, 9, 10, 11, 12]);
    assert_eq!(chosen("position:0.25", &scores), [2, 8, 9, 10]);
    assert_eq!(chosen("deviation:0.2", &scores), [15, 16, 17]);
    assert_eq!(chosen("attention:0.1+first:1", &scores), [2, 8, 16, 17]);
    for (selector, n_chosen) in [("random:0", 0), ("random:0.5", 7), ("random:1", 14)] {
        assert_eq!(chosen(selector, &scores).len(), n_chosen, "{selector}");
        assert_eq!(chosen(selector, &scores), chosen(selector, &[]), "by the tokens alone");
    }
}

#[test]
fn a_selector_is_written_as_it_is_read() {
    for text in [
        "none",
        "all",
        "first:16",
        "random:0.15",
        "position:0.5",
        "deviation:0.15@3",
        "first:2+attention:0.1",
    ] {
        assert_eq!(text.parse::<Selectors>().unwrap().to_string(), text);
    }
    assert_eq!("deviation:0.1".parse::<Selectors>().unwrap().to_string(), "deviation:0.1@1");
    for text in ["", "first", "first:-1", "random:1.5", "random:nan", "deviation:0.1@x", "all+none", "kv:0.1"]
    {
        let error = text.parse::<Selectors>().unwrap_err().to_string();
        assert!(error.contains("blend") && error.contains("first:TOKENS"), "{text}: {error}");
    }
}
