//! What the bytes of a chunk are, as far as a codec has to know it.

use std::fmt;

use kvik_types::Dtype;

use crate::error::{CodecError, Result};

/// Tokens of a token block in the layout of the built-in engine.
pub(crate) const BLOCK_TOKENS: usize = 16;

/// The largest head whose rows a codec takes; latents of MLA models are wider and are no heads.
pub(crate) const MAX_HEAD_DIM: usize = 512;

/// The most bytes of a chunk, as in the store.
const MAX_CHUNK_BYTES: u128 = 1 << 40;

/// How long a chunk is and what its bytes are: `n_layers` sections of equal length, layer 0 first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkShape {
    /// Layers of the chunk.
    pub n_layers: usize,
    /// Tokens of the chunk.
    pub n_tokens: usize,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Order of the elements of a section.
    pub layout: ChunkLayout,
}

/// Order of the elements of one section, which is one layer of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ChunkLayout {
    /// The built-in engine's: for each block of 16 tokens and each head, `head_dim` vectors of the keys of 16 tokens
    /// and then 16 rows of values, little endian. The tokens are a multiple of 16.
    KvikPaged {
        /// K (or V) heads of one layer.
        n_kv_heads: usize,
        /// Elements of one head.
        head_dim: usize,
    },
    /// The keys of all tokens and then the values, each `[n_tokens, n_kv_heads, head_dim]`, little endian: `kv_2td`.
    KeysThenValues {
        /// K (or V) heads of one layer.
        n_kv_heads: usize,
        /// Elements of one head.
        head_dim: usize,
    },
    /// Elements of which nothing but the type is known: only lossless codecs take them.
    Opaque {
        /// Elements of one token in one layer, K and V together.
        token_elements: usize,
    },
}

// === impl ChunkShape ===

impl ChunkShape {
    /// The shape of chunks of a namespace whose layout has this name, with `token_layer_bytes` a token and layer.
    ///
    /// The name is that of [`kvik_types::Namespace::layout`]. The built-in engine's is understood; any other is opaque,
    /// and so is one whose numbers do not give `token_layer_bytes`.
    pub fn of_layout_name(
        layout_name: &str,
        dtype: Dtype,
        n_layers: usize,
        n_tokens: usize,
        token_layer_bytes: usize,
    ) -> Self {
        let layout = paged_layout(layout_name, dtype, token_layer_bytes);
        let token_elements = token_layer_bytes / dtype.size_bytes();
        let layout = layout.unwrap_or(ChunkLayout::Opaque { token_elements });
        Self { n_layers, n_tokens, dtype, layout }
    }

    /// Bytes of one layer.
    pub fn section_bytes(&self) -> usize {
        self.section_elements() * self.dtype.size_bytes()
    }

    /// Bytes of the chunk.
    pub fn chunk_bytes(&self) -> usize {
        self.n_layers * self.section_bytes()
    }

    pub(crate) fn section_elements(&self) -> usize {
        self.n_tokens * self.layout.token_elements()
    }

    /// Fails on a shape that no chunk has.
    pub fn check(&self) -> Result<()> {
        let (n_heads, head_dim) = self.layout.numbers();
        let numbers = [
            ("n_layers", self.n_layers),
            ("n_tokens", self.n_tokens),
            ("n_kv_heads", n_heads),
            ("head_dim", head_dim),
        ];
        for (field, value) in numbers {
            if value == 0 || u32::try_from(value).is_err() {
                return Err(CodecError::invalid(field, &value, "1 to 4294967295"));
            }
        }
        let n_bytes = numbers.iter().fold(2 * self.dtype.size_bytes() as u128, |product, (_, value)| {
            product.saturating_mul(*value as u128)
        });
        if n_bytes > MAX_CHUNK_BYTES {
            return Err(CodecError::invalid("n_tokens", &self.n_tokens, "chunks of at most 1 TiB"));
        }
        if !matches!(self.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
            return Err(CodecError::invalid("dtype", &self.dtype, "bf16, f16, f32"));
        }
        if matches!(self.layout, ChunkLayout::KvikPaged { .. }) && !self.n_tokens.is_multiple_of(BLOCK_TOKENS)
        {
            return Err(CodecError::invalid("n_tokens", &self.n_tokens, "a multiple of 16"));
        }
        Ok(())
    }
}

// === impl ChunkLayout ===

impl ChunkLayout {
    /// The name in messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::KvikPaged { .. } => "kvik_paged",
            Self::KeysThenValues { .. } => "kv_2td",
            Self::Opaque { .. } => "opaque",
        }
    }

    fn token_elements(&self) -> usize {
        match *self {
            Self::KvikPaged { n_kv_heads, head_dim } | Self::KeysThenValues { n_kv_heads, head_dim } => {
                2 * n_kv_heads * head_dim
            }
            Self::Opaque { token_elements } => token_elements,
        }
    }

    /// Heads and elements of a head, as a head of a coded chunk says them.
    pub(crate) fn numbers(&self) -> (usize, usize) {
        match *self {
            Self::KvikPaged { n_kv_heads, head_dim } | Self::KeysThenValues { n_kv_heads, head_dim } => {
                (n_kv_heads, head_dim)
            }
            Self::Opaque { token_elements } => (1, token_elements),
        }
    }
}

impl fmt::Display for ChunkLayout {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Reads `kvik_paged_<version>/layers=8/heads=4/head_dim=32/block=16/f32_le/keys=head,dim,token/values=head,token,dim`,
/// of which every word must be there; the text may go on behind it.
fn paged_layout(name: &str, dtype: Dtype, token_layer_bytes: usize) -> Option<ChunkLayout> {
    let mut words = name.split('/');
    words.next()?.strip_prefix("kvik_paged_")?;
    words.next()?.strip_prefix("layers=")?;
    let n_kv_heads: usize = words.next()?.strip_prefix("heads=")?.parse().ok()?;
    let head_dim: usize = words.next()?.strip_prefix("head_dim=")?.parse().ok()?;
    let is_known = words.next()? == "block=16"
        && words.next()?.strip_suffix("_le")? == dtype.name()
        && words.next()? == "keys=head,dim,token"
        && words.next()?.split('+').next()? == "values=head,token,dim";
    let n_bytes = n_kv_heads.checked_mul(head_dim)?.checked_mul(2 * dtype.size_bytes())?;
    (is_known && n_bytes == token_layer_bytes).then_some(ChunkLayout::KvikPaged { n_kv_heads, head_dim })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "kvik_paged_2/layers=8/heads=4/head_dim=32/block=16/f32_le/keys=head,dim,token\
                        /values=head,token,dim";

    #[test]
    fn the_layout_of_the_built_in_engine_is_read_from_its_name() {
        let shape = ChunkShape::of_layout_name(NAME, Dtype::F32, 8, 256, 1024);
        assert_eq!(shape.layout, ChunkLayout::KvikPaged { n_kv_heads: 4, head_dim: 32 });
        assert_eq!(shape.chunk_bytes(), 8 * 256 * 1024);
        shape.check().unwrap();
        let qualified = format!("{NAME}/chunk_tokens=256");
        assert_eq!(ChunkShape::of_layout_name(&qualified, Dtype::F32, 8, 256, 1024), shape);
    }

    #[test]
    fn another_layout_or_other_numbers_are_opaque() {
        for (name, dtype, n_bytes) in [
            ("vllm_block_first_nhd/layers=8", Dtype::BF16, 1024),
            (NAME, Dtype::BF16, 512),
            (NAME, Dtype::F32, 512),
            ("kvik_paged_2/layers=8/heads=4/head_dim=32/block=16/f32_le", Dtype::F32, 1024),
        ] {
            let shape = ChunkShape::of_layout_name(name, dtype, 8, 256, n_bytes);
            assert_eq!(shape.layout, ChunkLayout::Opaque { token_elements: n_bytes / dtype.size_bytes() });
            assert_eq!(shape.section_bytes(), 256 * n_bytes);
        }
    }

    #[test]
    fn a_shape_that_no_chunk_has_is_refused_by_the_field() {
        let shape = ChunkShape::of_layout_name(NAME, Dtype::F32, 8, 256, 1024);
        for (shape, field) in [
            (ChunkShape { n_layers: 0, ..shape }, "n_layers"),
            (ChunkShape { n_tokens: 24, ..shape }, "n_tokens"),
            (ChunkShape { n_tokens: 1 << 31, ..shape }, "n_tokens"),
            (ChunkShape { dtype: Dtype::U8, ..shape }, "dtype"),
            (ChunkShape { layout: ChunkLayout::Opaque { token_elements: 0 }, ..shape }, "head_dim"),
        ] {
            let message = shape.check().unwrap_err().to_string();
            assert!(message.starts_with(&format!("`{field}` is ")), "{message}");
        }
    }
}
