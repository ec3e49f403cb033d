//! `/v1/models`.

use serde::{Deserialize, Serialize};

/// The models that are served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelList {
    /// Always `list`.
    pub object: String,
    /// The models.
    pub data: Vec<ModelCard>,
}

/// A model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCard {
    /// Its name.
    pub id: String,
    /// Always `model`.
    pub object: String,
    /// Unix time, in seconds, since when it is served.
    pub created: u64,
    /// Its owner.
    pub owned_by: String,
    /// Extension: longest sequence, prompt and output together, in tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<usize>,
}

impl ModelList {
    /// A list of models.
    pub fn new(data: Vec<ModelCard>) -> Self {
        Self { object: "list".to_owned(), data }
    }
}
