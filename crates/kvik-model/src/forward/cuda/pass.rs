//! One pass through the layers: all rows of a batch together, in one stream.

use crate::config::{ModelConfig, Norm};
use crate::error::Result;

use super::activations::{Activations, Inputs, qkv_width};
use super::kernels::{AttentionArguments, AttentionCounts, Kernels, NormalizeArguments, PlacingArguments};
use super::lists::ListSizes;
use super::pages::Pages;
use super::products::{OutKind, ProductArguments};
use super::weights::{LayerWeights, Linear, Matrix, ModelWeights, NormWeights};

/// What the kernels of one pass share. The caller has made room in `activations` for all rows, chunks and logits of `lists`, and
/// waits for the stream before any buffer goes.
pub(super) struct Pass<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) kernels: &'a Kernels,
    pub(super) weights: &'a ModelWeights,
    pub(super) activations: &'a Activations,
    pub(super) pages: &'a Pages,
    pub(super) lists: ListSizes,
    /// Of rotary positions.
    pub(super) frequencies: Option<u64>,
}

impl Pass<'_> {
    /// Address of the list that begins at this word.
    fn list(&self, word: usize) -> u64 {
        self.activations.lists.address() + (word * size_of::<u32>()) as u64
    }

    /// Queues the fetching of the lists, the embedding of all rows and what their positions ask for.
    pub(super) fn begin(&self) -> Result<()> {
        let host_lists = self.activations.host_lists.address();
        // SAFETY: the struct says that there is room for the lists; they are written again only after the pass.
        unsafe { self.kernels.queue_fetch_words(host_lists, self.list(0), self.lists.n_words)? };
        let hidden_size = self.config.hidden_size;
        let positions = self.weights.position_embedding.as_ref().map_or(0, Matrix::address);
        let lists = (self.list(self.lists.tokens), self.list(self.lists.positions));
        let sizes = (hidden_size as i32, self.weights.embedding.n_padded_inputs as i32);
        let (n_rows, activations) = (self.lists.n_rows, self.activations);
        // SAFETY: the struct says that there is room for all rows; tokens and positions were checked against the matrices.
        unsafe {
            self.kernels.queue_embed(
                n_rows,
                (self.weights.embedding.address(), positions),
                lists,
                activations.hidden.address(),
                sizes,
            )?;
            if let Some(frequencies) = self.frequencies {
                self.kernels.queue_rotations(
                    n_rows,
                    lists.1,
                    frequencies,
                    activations.rotations.address(),
                )?;
            }
        }
        Ok(())
    }

    /// Queues one layer.
    pub(super) fn layer(&self, layer_idx: usize, layer: &LayerWeights) -> Result<()> {
        let (config, activations) = (self.config, self.activations);
        let hidden = (activations.hidden.address(), config.hidden_size);
        self.normalize(&layer.attention_norm, None)?;
        self.linear(
            &layer.qkv,
            &activations.normalized,
            (activations.qkv.address(), qkv_width(config)),
            OutKind::Store,
        )?;
        self.place(layer_idx, layer)?;
        self.attend(layer_idx)?;
        self.linear(&layer.output, &activations.attended, hidden, OutKind::Add)?;
        self.normalize(&layer.mlp_norm, None)?;
        let kind = OutKind::of(config.activation);
        let activated = (activations.activated.address(), activations.activated.n_padded);
        self.linear(&layer.up, &activations.normalized, activated, kind)?;
        self.linear(&layer.down, &activations.activated, hidden, OutKind::Add)
    }

    /// Queues the logits of the rows that were asked for, and of no others.
    pub(super) fn logits(&self) -> Result<()> {
        let n_logits = self.lists.n_logits;
        if n_logits == 0 {
            return Ok(());
        }
        self.normalize(&self.weights.final_norm, Some(self.list(self.lists.chosen)))?;
        let matrix = self.weights.output_matrix();
        let out = (self.activations.logits.address(), self.config.vocab_size);
        self.product(matrix, 0, &self.activations.normalized, n_logits, out, OutKind::Store)
    }

    /// Queues the choice of a token for each row of logits.
    pub(super) fn choose_tokens(&self) -> Result<()> {
        let (logits, chosen) = (self.activations.logits.address(), self.activations.chosen.address());
        let (n_rows, draws) = (self.lists.n_logits, self.list(self.lists.draws));
        // SAFETY: the struct says that there is room for all rows of logits; there is a draw for each.
        unsafe { self.kernels.queue_choose_tokens(n_rows, logits, draws, chosen, self.config.vocab_size) }
    }

    fn normalize(&self, norm: &NormWeights, chosen: Option<u64>) -> Result<()> {
        let epsilon = match self.config.norm {
            Norm::Rms { epsilon } | Norm::Layer { epsilon } => epsilon,
        };
        let n_rows = if chosen.is_some() { self.lists.n_logits } else { self.lists.n_rows };
        let arguments = NormalizeArguments {
            hidden: self.activations.hidden.address(),
            chosen: chosen.unwrap_or(0),
            scale: norm.scale_address(),
            shift: norm.shift_address(),
            out: self.activations.normalized.address(),
            hidden_size: self.config.hidden_size as i32,
            n_padded: self.activations.normalized.n_padded as i32,
            epsilon,
        };
        // SAFETY: the struct says that there is room for all rows; those chosen are among them.
        unsafe { self.kernels.queue_normalize(n_rows, arguments) }
    }

    fn linear(&self, linear: &Linear, inputs: &Inputs, out: (u64, usize), kind: OutKind) -> Result<()> {
        self.product(&linear.matrix, linear.bias_address(), inputs, self.lists.n_rows, out, kind)
    }

    fn product(
        &self,
        matrix: &Matrix,
        bias: u64,
        inputs: &Inputs,
        n_rows: usize,
        out: (u64, usize),
        out_kind: OutKind,
    ) -> Result<()> {
        let product = ProductArguments {
            weights: matrix.address(),
            inputs: inputs.address(),
            bias,
            out: out.0,
            n_outputs: matrix.n_outputs as i32,
            n_rows: n_rows as i32,
            n_padded_inputs: matrix.n_padded_inputs as i32,
            out_stride: out.1 as i32,
            out_kind,
        };
        let maps = matrix.map.as_ref().zip(inputs.maps.as_ref());
        // SAFETY: the struct says that there is room for all rows, and the callers pass buffers that are as wide as the matrix.
        unsafe { self.kernels.queue_product(product, maps) }
    }

    /// Queues the rotation of queries and keys, and the writing of keys and values.
    fn place(&self, layer_idx: usize, layer: &LayerWeights) -> Result<()> {
        let epsilon = match self.config.norm {
            Norm::Rms { epsilon } | Norm::Layer { epsilon } => epsilon,
        };
        let (query_scale, key_scale) =
            layer.qk_norm.as_ref().map_or((0, 0), |(queries, keys)| (queries.address(), keys.address()));
        let placing = PlacingArguments {
            rows: self.activations.qkv.address(),
            rotations: self.frequencies.map_or(0, |_| self.activations.rotations.address()),
            query_scale,
            key_scale,
            pages: self.pages.layer_address(layer_idx),
            tables: self.list(self.lists.tables),
            table_starts: self.list(self.lists.table_starts),
            positions: self.list(self.lists.positions),
            n_query_heads: self.config.n_query_heads as i32,
            n_kv_heads: self.config.n_kv_heads as i32,
            epsilon,
        };
        // SAFETY: as above; the plan of the rows says that tables name blocks of the pages and that no block is written twice.
        unsafe { self.kernels.queue_place_rows(self.lists.n_rows, placing) }
    }

    fn attend(&self, layer_idx: usize) -> Result<()> {
        let (config, lists) = (self.config, self.lists);
        let arguments = AttentionArguments {
            queries: self.activations.qkv.address(),
            pages: self.pages.layer_address(layer_idx),
            tables: self.list(lists.tables),
            positions: self.list(lists.positions),
            items: self.list(lists.items),
            out: self.activations.attended.address(),
            partials: self.activations.partials.address(),
            query_stride: qkv_width(config) as i32,
            out_padded: self.activations.attended.n_padded as i32,
            n_kv_heads: config.n_kv_heads as i32,
            window: config.sliding_windows[layer_idx].map_or(0, |window| window as i32),
            // The kernels take powers of two instead of e.
            scale: std::f32::consts::LOG2_E / (config.head_dim as f32).sqrt(),
        };
        let counts = AttentionCounts {
            many_items: lists.n_many,
            chunks: lists.n_chunks,
            merged_rows: lists.n_merged,
            query_heads: config.n_query_heads,
        };
        // SAFETY: as above; there is a slot for each chunk.
        unsafe { self.kernels.queue_attention(arguments, counts, self.pages.maps(layer_idx)) }
    }
}
