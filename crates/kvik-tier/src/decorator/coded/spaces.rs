//! What the chunks of a namespace are made of.

use std::collections::HashMap;

use kvik_codec::{ChunkLayout, ChunkShape};
use kvik_types::{Dtype, Namespace};
use parking_lot::RwLock;

use super::page::MAX_LAYERS;
use crate::key::NamespaceId;

/// The layouts of namespaces, as their stores learn them; a tier sees nothing but bytes.
#[derive(Debug, Default)]
pub struct CodedSpaces {
    by_id: RwLock<HashMap<NamespaceId, Known>>,
}

/// What is known of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    layout_name: String,
    dtype: Dtype,
    token_layer_bytes: usize,
}

impl CodedSpaces {
    /// Learns a namespace in which one token has `token_layer_bytes` in one layer of one rank.
    pub fn learn(&self, namespace: &Namespace, token_layer_bytes: u64) {
        let known = Known {
            layout_name: namespace.layout.clone(),
            dtype: namespace.dtype,
            token_layer_bytes: usize::try_from(token_layer_bytes).unwrap_or(usize::MAX),
        };
        let id = NamespaceId::from(namespace);
        if self.by_id.read().get(&id) != Some(&known) {
            self.by_id.write().insert(id, known);
        }
    }

    /// The shape of a chunk, which nothing but the length of its sections may be known of; none if it is not made of
    /// equal sections of floats, or of too many.
    pub(super) fn shape_of(
        &self,
        namespace: NamespaceId,
        n_bytes: usize,
        section_bytes: usize,
    ) -> Option<ChunkShape> {
        let n_layers = n_bytes.checked_div(section_bytes)?;
        if n_layers * section_bytes != n_bytes || !(1..=MAX_LAYERS).contains(&n_layers) {
            return None;
        }
        let known = self.by_id.read().get(&namespace).cloned();
        let shape = known.as_ref().and_then(|known| known.shape(n_layers, section_bytes));
        // Planes of bytes are lossless whatever the elements are: two bytes at a time are as good a guess as any.
        let dtype = known.map_or(Dtype::BF16, |known| known.float_dtype());
        let opaque = || {
            let token_elements = section_bytes / dtype.size_bytes();
            let layout = ChunkLayout::Opaque { token_elements };
            let shape = ChunkShape { n_layers, n_tokens: 1, dtype, layout };
            (shape.section_bytes() == section_bytes).then_some(shape)
        };
        shape.or_else(opaque).filter(|shape| shape.check().is_ok())
    }
}

impl Known {
    /// The shape of sections of whole tokens.
    fn shape(&self, n_layers: usize, section_bytes: usize) -> Option<ChunkShape> {
        let n_tokens = section_bytes.checked_div(self.token_layer_bytes)?;
        let shape = ChunkShape::of_layout_name(
            &self.layout_name,
            self.float_dtype(),
            n_layers,
            n_tokens,
            self.token_layer_bytes,
        );
        (shape.section_bytes() == section_bytes && shape.check().is_ok()).then_some(shape)
    }

    fn float_dtype(&self) -> Dtype {
        match self.dtype {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => self.dtype,
            _ => Dtype::BF16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(layout: &str, dtype: Dtype) -> Namespace {
        Namespace { model: "m".to_owned(), dtype, layout: layout.to_owned(), tenant: String::new() }
    }

    #[test]
    fn a_layout_that_was_learned_gives_its_shape_and_any_other_an_opaque_one() {
        let paged = namespace(
            "kvik_paged_1/layers=2/heads=2/head_dim=8/block=16/f16_le/keys=head,dim,token/values=head,token,dim+int8",
            Dtype::F16,
        );
        let spaces = CodedSpaces::default();
        let shape = |id, n_bytes, section_bytes| spaces.shape_of(id, n_bytes, section_bytes);
        let id = NamespaceId::from(&paged);
        // 16 tokens of 64 bytes a layer.
        assert_eq!(shape(id, 2048, 1024).unwrap().layout, ChunkLayout::Opaque { token_elements: 512 });
        spaces.learn(&paged, 64);
        let known = shape(id, 2048, 1024).unwrap();
        assert_eq!(known.layout, ChunkLayout::KvikPaged { n_kv_heads: 2, head_dim: 8 });
        assert_eq!((known.n_layers, known.n_tokens, known.dtype), (2, 16, Dtype::F16));
        // Not whole blocks.
        assert_eq!(shape(id, 1280, 640).unwrap().layout, ChunkLayout::Opaque { token_elements: 320 });
        let other = namespace("mine", Dtype::Fp8E4M3);
        spaces.learn(&other, 64);
        assert_eq!(shape(NamespaceId::from(&other), 2048, 1024).unwrap().dtype, Dtype::BF16);
    }

    #[test]
    fn what_is_not_made_of_equal_sections_of_floats_has_no_shape() {
        let spaces = CodedSpaces::default();
        let id = NamespaceId::from(&namespace("mine", Dtype::BF16));
        for (n_bytes, section_bytes) in [(100, 0), (100, 30), (99, 33), (0, 10), (100_000, 2), (10, 20)] {
            assert_eq!(spaces.shape_of(id, n_bytes, section_bytes), None, "{n_bytes} of {section_bytes}");
        }
    }
}
