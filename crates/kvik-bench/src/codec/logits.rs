//! What a codec changes in what the bundled model says next.

use anyhow::{Context as _, ensure};
use kvik_codec::{ChunkShape, Codec, round_trip};
use kvik_model::{
    BLOCK_TOKENS, Backend as _, BlockId, CpuBackend, CpuBackendOptions, EngineEvent, EngineOptions,
    GenerateRequest, Logits, Model, RowPositions, SamplingParams, SequenceRows,
};
use kvik_types::{Dtype, TokenId};

use super::CHUNK_TOKENS;

/// Chunks that are coded.
const N_CHUNKS: usize = 4;

/// Tokens behind them whose logits are compared.
const N_ROWS: usize = 128;

/// A text of the bundled model, of which the first chunks may be coded.
pub(super) struct LogitsProbe {
    backend: CpuBackend,
    table: Vec<BlockId>,
    tokens: Vec<TokenId>,
    shape: ChunkShape,
    /// Each chunk as the engine left it.
    chunks: Vec<Vec<u8>>,
    exact: Vec<Vec<f32>>,
}

/// How far logits are from those of exact KV.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LogitsChange {
    pub(super) largest: f64,
    pub(super) mean: f64,
    /// Rows whose largest logit is of the same token.
    pub(super) same_choice_share: f64,
}

impl LogitsProbe {
    /// Has the bundled model write a text, and computes it in bf16.
    pub(super) fn try_new() -> anyhow::Result<Self> {
        let model = Model::bundled().context("open the bundled model")?;
        let tokens = text(&model)?;
        let mut options = CpuBackendOptions::default();
        options.kv_dtype = Dtype::BF16;
        let n_blocks = tokens.len().div_ceil(BLOCK_TOKENS);
        options.n_blocks = n_blocks;
        let mut backend = CpuBackend::load(model.config().clone(), model.checkpoint(), &options)?;
        let table: Vec<BlockId> = (0..n_blocks as u32).map(BlockId::new).collect();
        let n_before = N_CHUNKS * CHUNK_TOKENS;
        let before = SequenceRows {
            tokens: &tokens[..n_before],
            positions: RowPositions::From(0),
            block_table: &table[..n_before / BLOCK_TOKENS],
            n_logits: 0,
        };
        backend.forward(&[before], &mut Logits::default())?;
        let (n_layers, block_bytes) = (model.config().n_layers, backend.block_layer_bytes());
        let n_chunk_blocks = CHUNK_TOKENS / BLOCK_TOKENS;
        let mut chunks = Vec::with_capacity(N_CHUNKS);
        for blocks in table[..n_before / BLOCK_TOKENS].chunks_exact(n_chunk_blocks) {
            let mut raw = vec![0; n_layers * n_chunk_blocks * block_bytes];
            for (idx, bytes) in raw.chunks_exact_mut(block_bytes).enumerate() {
                backend.export_block(idx / n_chunk_blocks, blocks[idx % n_chunk_blocks], bytes)?;
            }
            chunks.push(raw);
        }
        let shape = ChunkShape::of_layout_name(
            &backend.kv_layout(),
            Dtype::BF16,
            n_layers,
            CHUNK_TOKENS,
            block_bytes / BLOCK_TOKENS,
        );
        let mut probe = Self { backend, table, tokens, shape, chunks, exact: Vec::new() };
        probe.exact = probe.logits()?;
        Ok(probe)
    }

    /// The standard deviation of the exact logits of a row, mean over the rows: what changes are to be held against.
    pub(super) fn spread(&self) -> f64 {
        let deviation = |row: &Vec<f32>| {
            let mean = row.iter().map(|logit| f64::from(*logit)).sum::<f64>() / row.len() as f64;
            let squares = row.iter().map(|logit| (f64::from(*logit) - mean).powi(2)).sum::<f64>();
            (squares / row.len() as f64).sqrt()
        };
        self.exact.iter().map(deviation).sum::<f64>() / self.exact.len().max(1) as f64
    }

    /// Puts what a codec gives back in the place of the chunks, and computes the rest again.
    pub(super) fn change(&mut self, codec: &dyn Codec) -> anyhow::Result<LogitsChange> {
        let n_chunk_blocks = CHUNK_TOKENS / BLOCK_TOKENS;
        let block_bytes = self.backend.block_layer_bytes();
        for (raw, blocks) in self.chunks.iter().zip(self.table.chunks_exact(n_chunk_blocks)) {
            let back = round_trip(codec, &self.shape, raw)?;
            for (idx, bytes) in back.chunks_exact(block_bytes).enumerate() {
                self.backend.import_block(idx / n_chunk_blocks, blocks[idx % n_chunk_blocks], bytes)?;
            }
        }
        let coded = self.logits()?;
        let (mut largest, mut sum, mut n_logits, mut n_same) = (0.0_f64, 0.0, 0_usize, 0_usize);
        for (exact, coded) in self.exact.iter().zip(&coded) {
            for (exact, coded) in exact.iter().zip(coded) {
                let change = f64::from((exact - coded).abs());
                largest = largest.max(change);
                sum += change;
                n_logits += 1;
            }
            n_same += usize::from(choice(exact) == choice(coded));
        }
        Ok(LogitsChange {
            largest,
            mean: sum / n_logits.max(1) as f64,
            same_choice_share: n_same as f64 / self.exact.len().max(1) as f64,
        })
    }

    /// The logits of the rows behind the chunks, as the blocks are now.
    fn logits(&mut self) -> anyhow::Result<Vec<Vec<f32>>> {
        let first = N_CHUNKS * CHUNK_TOKENS;
        let rows = SequenceRows {
            tokens: &self.tokens[first..first + N_ROWS],
            positions: RowPositions::From(first),
            block_table: &self.table,
            n_logits: N_ROWS,
        };
        let mut logits = Logits::default();
        self.backend.forward(&[rows], &mut logits)?;
        Ok((0..logits.n_rows()).map(|row| logits.row(row).to_vec()).collect())
    }
}

/// A text that the model writes.
fn text(model: &Model) -> anyhow::Result<Vec<TokenId>> {
    let n_tokens = N_CHUNKS * CHUNK_TOKENS + N_ROWS;
    let mut engine = model.cpu_engine(&CpuBackendOptions::default(), EngineOptions::default())?;
    let sampling = SamplingParams {
        temperature: 1.0,
        seed: Some(1),
        ignore_eos: true,
        ..SamplingParams::greedy(n_tokens as u32)
    };
    engine.submit(GenerateRequest { prompt: vec![1], sampling })?;
    let mut tokens = vec![1];
    for event in engine.run_until_idle()? {
        match event {
            EngineEvent::Token(token) => tokens.push(token.token),
            EngineEvent::Failed { error, .. } => return Err(error.into()),
            _ => {}
        }
    }
    tokens.truncate(n_tokens);
    ensure!(tokens.len() == n_tokens, "the model wrote {} of {n_tokens} tokens", tokens.len());
    Ok(tokens)
}

/// The token of the largest logit.
fn choice(row: &[f32]) -> Option<usize> {
    let best = row.iter().enumerate().max_by(|left, right| left.1.total_cmp(right.1));
    best.map(|(token, _)| token)
}

#[cfg(test)]
mod tests {
    use kvik_codec::{NAMES, by_name};

    use super::*;

    #[test]
    fn lossless_codecs_change_no_logit_and_stronger_codecs_change_more() {
        let mut probe = LogitsProbe::try_new().unwrap();
        let mut of = |name: &str| probe.change(&*by_name(name).unwrap()).unwrap();
        // In this order: what a codec left is not there any more for the next.
        let [int4, int8, lossless] = ["int4", "int8", "lossless"].map(&mut of);
        assert_eq!(lossless, LogitsChange { largest: 0.0, mean: 0.0, same_choice_share: 1.0 });
        assert!(0.0 < int8.mean && int8.mean < int4.mean && int4.mean < int4.largest, "{int8:?} {int4:?}");
        assert!(probe.spread() > int8.mean);
        assert!(NAMES.contains(&"cachegen"));
    }
}
