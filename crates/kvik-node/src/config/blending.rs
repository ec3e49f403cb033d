//! LMCache's names for blending.

use super::StoreConfig;
use super::field::{check, refuse};
use crate::error::Result;

/// What LMCache recommends where its file names no share.
const DEFAULT_RATIO: f32 = 0.15;
/// As LMCache.
const DEFAULT_CHECK_LAYER: usize = 1;
/// As LMCache.
const DEFAULT_MIN_TOKENS: usize = 256;
/// As LMCache.
const DEFAULT_SEPARATOR: &str = " # # ";

/// How LMCache's names say that prompts are put together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlendingPlan {
    /// The selector, in kvik's words.
    pub selector: String,
    /// What stands between the parts of a prompt.
    pub separator: String,
    /// Parts with fewer tokens are computed.
    pub min_tokens: usize,
}

impl StoreConfig {
    /// What `enable_blending` and the names beside it ask for; `None` where it is off.
    ///
    /// # Errors
    /// [`NodeError::Invalid`](crate::NodeError::Invalid) for a value without a meaning.
    pub fn blending(&self) -> Result<Option<BlendingPlan>> {
        if let Some(thresholds) = &self.blend_thresholds {
            let allowed = "not set: tokens are chosen by `store.blend_recompute_ratios`";
            return refuse("store.blend_thresholds", &format!("{thresholds:?}"), allowed);
        }
        if self.enable_blending != Some(true) {
            return Ok(None);
        }
        let ratio = match self.blend_recompute_ratios.as_deref() {
            None => DEFAULT_RATIO,
            Some([ratio]) if (0.0..=1.0).contains(ratio) => *ratio,
            Some(ratios) => {
                return refuse("store.blend_recompute_ratios", &format!("{ratios:?}"), "one ratio, 0 to 1");
            }
        };
        let layer_idx = match self.blend_check_layers.as_deref() {
            None => DEFAULT_CHECK_LAYER,
            Some([layer_idx]) => *layer_idx,
            Some(layers) => {
                return refuse("store.blend_check_layers", &format!("{layers:?}"), "one layer, from 0");
            }
        };
        let separator = self.blend_special_str.clone().unwrap_or_else(|| DEFAULT_SEPARATOR.to_owned());
        check(!separator.is_empty(), "store.blend_special_str", &separator, "at least one character")?;
        Ok(Some(BlendingPlan {
            selector: format!("deviation:{ratio}@{layer_idx}"),
            separator,
            min_tokens: self.blend_min_tokens.unwrap_or(DEFAULT_MIN_TOKENS),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(json: &str) -> Result<Option<BlendingPlan>> {
        serde_json::from_str::<StoreConfig>(json).unwrap().blending()
    }

    #[test]
    fn blending_of_lmcache_is_a_selector_a_separator_and_a_length() {
        assert_eq!(plan("{}").unwrap(), None);
        assert_eq!(plan(r#"{"enable_blending": false, "blend_min_tokens": 3}"#).unwrap(), None);
        let default = plan(r#"{"enable_blending": true}"#).unwrap().unwrap();
        assert_eq!(default.selector, "deviation:0.15@1");
        assert_eq!((default.separator.as_str(), default.min_tokens), (" # # ", 256));
        let given = r#"{"enable_blending": true, "blend_recompute_ratios": [0.25], "blend_check_layers": [3],
            "blend_special_str": "--", "blend_min_tokens": 16}"#;
        let given = plan(given).unwrap().unwrap();
        assert_eq!(given.selector, "deviation:0.25@3");
        assert_eq!((given.separator.as_str(), given.min_tokens), ("--", 16));
    }

    #[test]
    fn blending_without_a_meaning_is_refused_by_name() {
        for (json, field) in [
            (r#"{"blend_thresholds": [0.1]}"#, "store.blend_thresholds"),
            (
                r#"{"enable_blending": true, "blend_recompute_ratios": [0.1, 0.2]}"#,
                "store.blend_recompute_ratios",
            ),
            (r#"{"enable_blending": true, "blend_recompute_ratios": [1.5]}"#, "store.blend_recompute_ratios"),
            (r#"{"enable_blending": true, "blend_check_layers": []}"#, "store.blend_check_layers"),
            (r#"{"enable_blending": true, "blend_special_str": ""}"#, "store.blend_special_str"),
        ] {
            let error = plan(json).unwrap_err().to_string();
            assert!(error.contains(field), "{json}: {error}");
        }
    }
}
