//! Methods of a backend that wraps another one, for tests that change only a few of them.

/// Implements the named methods of `kvik_model::Backend` by those of the field `inner`.
macro_rules! by_inner {
    (&mut $name:ident($($argument:ident: $kind:ty),*) -> $output:ty) => {
        fn $name(&mut self, $($argument: $kind),*) -> $output {
            kvik_model::Backend::$name(&mut self.inner, $($argument),*)
        }
    };
    (& $name:ident($($argument:ident: $kind:ty),*) -> $output:ty) => {
        fn $name(&self, $($argument: $kind),*) -> $output {
            kvik_model::Backend::$name(&self.inner, $($argument),*)
        }
    };
    (config) => { by_inner!(&config() -> &kvik_model::ModelConfig); };
    (n_blocks) => { by_inner!(&n_blocks() -> usize); };
    (forward) => {
        by_inner!(&mut forward(rows: &[kvik_model::SequenceRows<'_>], logits: &mut kvik_model::Logits)
            -> kvik_model::Result<()>);
    };
    (forward_layers) => {
        by_inner!(&mut forward_layers(rows: &[kvik_model::SequenceRows<'_>], n_layers: usize)
            -> kvik_model::Result<()>);
    };
    (forward_watched) => {
        by_inner!(&mut forward_watched(rows: kvik_model::SequenceRows<'_>, n_watched: usize,
            layers: std::ops::Range<usize>, weights: &mut [f32]) -> kvik_model::Result<()>);
    };
    (place_kv) => {
        by_inner!(&mut place_kv(layer_idx: usize, table: &[kvik_model::BlockId], first_position: usize,
            turned_by: i64, part: kvik_model::SegmentPart<'_>) -> kvik_model::Result<()>);
    };
    (copy_block) => {
        by_inner!(&mut copy_block(from: kvik_model::BlockId, to: kvik_model::BlockId)
            -> kvik_model::Result<()>);
    };
    (kv_dtype) => { by_inner!(&kv_dtype() -> kvik_types::Dtype); };
    (export_kv) => {
        by_inner!(&export_kv(layer_idx: usize, table: &[kvik_model::BlockId], n_tokens: usize)
            -> kvik_model::Result<kvik_model::LayerKv>);
    };
    (import_kv) => {
        by_inner!(&mut import_kv(layer_idx: usize, table: &[kvik_model::BlockId], kv: &kvik_model::LayerKv)
            -> kvik_model::Result<()>);
    };
    (kv_layout) => { by_inner!(&kv_layout() -> String); };
    (block_layer_bytes) => { by_inner!(&block_layer_bytes() -> usize); };
    (export_block) => {
        by_inner!(&export_block(layer_idx: usize, block: kvik_model::BlockId, out: &mut [u8])
            -> kvik_model::Result<()>);
    };
    (pin_blocks) => {
        by_inner!(&mut pin_blocks(blocks: &[kvik_model::BlockId])
            -> kvik_model::Result<Box<dyn kvik_model::PinnedKv>>);
    };
    (import_block) => {
        by_inner!(&mut import_block(layer_idx: usize, block: kvik_model::BlockId, bytes: &[u8])
            -> kvik_model::Result<()>);
    };
    ($first:ident $($other:ident)+) => {
        by_inner!($first);
        $(by_inner!($other);)+
    };
}

pub(crate) use by_inner;
