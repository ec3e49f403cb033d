//! The model that the binary carries.

/// Name of the bundled model.
pub(crate) const NAME: &str = "kvik-tiny";

pub(crate) const CONFIG: &str = include_str!("../../../models/kvik-tiny/config.json");
pub(crate) const GENERATION_CONFIG: &[u8] =
    include_bytes!("../../../models/kvik-tiny/generation_config.json");
pub(crate) const TOKENIZER: &[u8] = include_bytes!("../../../models/kvik-tiny/tokenizer.json");
pub(crate) const TOKENIZER_CONFIG: &[u8] = include_bytes!("../../../models/kvik-tiny/tokenizer_config.json");
pub(crate) const WEIGHTS: &[u8] = include_bytes!("../../../models/kvik-tiny/model.safetensors");
