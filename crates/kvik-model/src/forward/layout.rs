//! The names of the KV that backends leave.

use std::fmt;
use std::str::FromStr;

use kvik_types::Dtype;

use crate::config::ModelConfig;
use crate::error::{ModelError, Result};
use crate::paging::BLOCK_TOKENS;

/// Counts the changes of the order of a block's bytes, which all backends have in common outside of themselves.
const BYTES_VERSION: u32 = 1;

/// Which engines of a model may use each other's KV.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvSharing {
    /// Those that leave the same bytes for the same tokens: of the same backend.
    #[default]
    Exact,
    /// Those that keep KV in the same type, also a CPU's and a GPU's. KV of another backend differs in the last bits, so an
    /// answer that goes on from it may choose another token where two are nearly as likely.
    Dtype,
}

impl KvSharing {
    /// Names the bytes of a block. `arithmetic` is the backend's own name for how they come about, and `detail` what else
    /// decides them.
    pub(super) fn layout(
        self,
        config: &ModelConfig,
        kv_dtype: Dtype,
        (arithmetic, detail): (&str, &str),
    ) -> String {
        let any = format!("kvik_paged_any_{BYTES_VERSION}");
        let (arithmetic, detail) = match self {
            Self::Exact => (arithmetic, detail),
            Self::Dtype => (any.as_str(), ""),
        };
        format!(
            "{arithmetic}/layers={}/heads={}/head_dim={}/block={BLOCK_TOKENS}/{kv_dtype}_le\
             /keys=head,dim,token/values=head,token,dim{detail}",
            config.n_layers, config.n_kv_heads, config.head_dim
        )
    }
}

impl fmt::Display for KvSharing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Exact => "exact",
            Self::Dtype => "dtype",
        })
    }
}

impl FromStr for KvSharing {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "exact" => Ok(Self::Exact),
            "dtype" => Ok(Self::Dtype),
            _ => Err(ModelError::config("kv_sharing", text, "exact or dtype")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CpuBackend, CudaBackend};
    use super::*;
    use crate::checkpoint::WeightDtype;
    use crate::model::Model;

    #[test]
    fn only_kv_that_is_shared_by_its_type_has_one_name_on_cpu_and_gpu() {
        let model = Model::bundled().unwrap();
        let config = model.config();
        let cpu = |sharing, dtype| CpuBackend::kv_layout_of(config, dtype, sharing);
        let cuda = |sharing, dtype| CudaBackend::kv_layout_of(config, (WeightDtype::BF16, dtype), sharing);
        assert_ne!(cpu(KvSharing::Exact, Dtype::BF16), cuda(KvSharing::Exact, Dtype::BF16));
        assert_eq!(cpu(KvSharing::Dtype, Dtype::BF16), cuda(KvSharing::Dtype, Dtype::BF16));
        assert_ne!(cpu(KvSharing::Dtype, Dtype::BF16), cuda(KvSharing::Dtype, Dtype::F16));
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            assert_ne!(cpu(KvSharing::Dtype, dtype), cpu(KvSharing::Exact, dtype));
            assert_ne!(cuda(KvSharing::Dtype, dtype), cuda(KvSharing::Exact, dtype));
        }
    }

    #[test]
    fn a_word_for_what_may_be_shared_is_read_as_it_is_shown() {
        for sharing in [KvSharing::Exact, KvSharing::Dtype] {
            assert_eq!(sharing.to_string().parse::<KvSharing>().unwrap(), sharing);
        }
        assert!("all".parse::<KvSharing>().unwrap_err().to_string().contains("exact or dtype"));
    }
}
