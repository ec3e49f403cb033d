//! How much smaller codecs make KV, and how fast they are on one core.
//!
//! Chunks of 256 tokens in bf16: real ones of the bundled model, computed by the built-in engine, and made ones of the shape of
//! Llama 3 8B (32 layers, 8 KV heads of 128), four times as large as the caches of a core. Rates are bytes before coding
//! a second, both ways, beside a copy of the same bytes. Of the bundled model also the change of logits: of 128 tokens behind
//! four chunks that were coded, beside those behind exact ones.

mod logits;
mod synthetic;

use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use kvik_codec::{ChunkLayout, ChunkShape, Codec, CodedHead, Isa, NAMES, by_name, encode};
use kvik_model::{
    CpuBackendOptions, EndedSequence, EngineOptions, GenerateRequest, KvSink, Model, SamplingParams,
};
use kvik_types::Dtype;
use serde_json::json;

use self::logits::{LogitsChange, LogitsProbe};
use crate::report::{Baseline, Goal, Measurement};

/// Tokens of a chunk.
const CHUNK_TOKENS: usize = 256;

/// What the codec after `CacheGen` should reach.
const WANTED_RATIO: f64 = 3.0;
const WANTED_DECODE_GB_S: f64 = 1.0;

/// Whose KV is coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// The bundled model's.
    KvikTiny,
    /// Made numbers of the shape of Llama 3 8B.
    Llama8b,
}

/// The measurements of `kvik bench codec`.
#[derive(Debug, Clone, Copy)]
pub struct CodecBench {
    /// Takes less time for less precise values.
    pub is_quick: bool,
}

/// A chunk to be coded.
struct Sample {
    shape: ChunkShape,
    raw: Vec<u8>,
}

/// Keeps what the engine offers.
#[derive(Debug)]
struct Keeping(mpsc::Sender<EndedSequence>);

impl Subject {
    /// Both.
    pub const ALL: [Self; 2] = [Self::KvikTiny, Self::Llama8b];

    /// The end of the names of its rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::KvikTiny => "kvik_tiny",
            Self::Llama8b => "llama_8b",
        }
    }
}

impl CodecBench {
    /// What is measured, for programs.
    pub fn settings(&self) -> serde_json::Value {
        json!({
            "chunk_tokens": CHUNK_TOKENS,
            "dtype": "bf16",
            "isa": Isa::detect().to_string(),
            "seconds_per_row": self.at_least().as_secs_f64(),
        })
    }

    /// What is measured, for people.
    pub fn description(&self) -> String {
        format!("chunks of {CHUNK_TOKENS} tokens in bf16 on one core with {}", Isa::detect())
    }

    /// Measures all codecs on one subject.
    ///
    /// # Errors
    /// If the bundled model cannot be run.
    pub fn measure(&self, subject: Subject) -> anyhow::Result<Vec<Measurement>> {
        let sample = match subject {
            Subject::KvikTiny => Sample::of_bundled_model()?,
            Subject::Llama8b => Sample::of_llama_8b(if self.is_quick { 2 } else { 32 }),
        };
        let mut results = Vec::new();
        let mut probe = match subject {
            Subject::KvikTiny => Some(LogitsProbe::try_new()?),
            Subject::Llama8b => None,
        };
        for name in NAMES.into_iter().filter(|name| *name != "none") {
            let codec = by_name(name)?;
            results.extend(self.measure_codec(&*codec, &sample, subject)?);
            if let Some(probe) = &mut probe {
                results.extend(logits_rows(probe, &*codec)?);
            }
        }
        results.extend(probe.and_then(|probe| {
            Measurement::from_repeats("logit_spread_kvik_tiny".to_owned(), "logit", vec![probe.spread()])
        }));
        Ok(results)
    }

    fn at_least(self) -> Duration {
        if self.is_quick { Duration::from_millis(20) } else { Duration::from_secs(1) }
    }

    fn measure_codec(
        self,
        codec: &dyn Codec,
        sample: &Sample,
        subject: Subject,
    ) -> anyhow::Result<Vec<Measurement>> {
        let Sample { shape, raw } = sample;
        let mut coded = Vec::new();
        encode(codec, shape, raw, &mut coded)?;
        let ratio = raw.len() as f64 / coded.len() as f64;
        let head = CodedHead::decode(&coded)?;
        let (mut back, mut copied) = (vec![0; raw.len()], vec![0; raw.len()]);
        let (mut encode_rates, mut decode_rates, mut copy_rates) = (Vec::new(), Vec::new(), Vec::new());
        let begun = Instant::now();
        // In turns, so that what else the machine does falls on all of them.
        while decode_rates.len() < 3 || begun.elapsed() < self.at_least() {
            copy_rates.push(rate_of(raw.len(), || copied.copy_from_slice(raw)));
            let mut decoded = Ok(());
            decode_rates
                .push(rate_of(raw.len(), || decoded = decode_layers(codec, &head, &coded, &mut back)));
            decoded?;
            coded.clear();
            let mut encoded = Ok(());
            encode_rates.push(rate_of(raw.len(), || encoded = encode(codec, shape, raw, &mut coded)));
            encoded?;
        }
        let is_cachegen = codec.name() == "cachegen";
        let row = |what: &str| format!("{}_{what}_{}", codec.name(), subject.name());
        let rate = |what: &str, rates: Vec<f64>, goal: Option<Goal>| {
            let row = Measurement::from_repeats(row(what), "GB/s", rates);
            row.map(|row| row.compared_with(Baseline::new("memcpy", copy_rates.clone()), goal))
        };
        let ratio_row = Measurement::from_repeats(row("ratio"), "ratio", vec![ratio]);
        let ratio_row = if is_cachegen {
            ratio_row.map(|row| row.wanted(Goal::AtLeast(WANTED_RATIO)))
        } else {
            ratio_row
        };
        let decode_goal = is_cachegen.then_some(Goal::AtLeast(WANTED_DECODE_GB_S));
        let rows = [
            ratio_row,
            rate("encode_gb_s", encode_rates, None),
            rate("decode_gb_s", decode_rates, decode_goal),
        ];
        Ok(rows.into_iter().flatten().collect())
    }
}

/// What a codec changes in the logits of the bundled model.
fn logits_rows(probe: &mut LogitsProbe, codec: &dyn Codec) -> anyhow::Result<Vec<Measurement>> {
    let LogitsChange { largest, mean, same_choice_share } = probe.change(codec)?;
    let row = |what: &str, unit, value: f64| {
        Measurement::from_repeats(format!("{}_{what}_kvik_tiny", codec.name()), unit, vec![value])
    };
    let rows = [
        row("logit_change_largest", "logit", largest),
        row("logit_change_mean", "logit", mean),
        row("same_choice", "share", same_choice_share),
    ];
    Ok(rows.into_iter().flatten().collect())
}

impl Sample {
    /// The first 256 tokens that the bundled model says.
    fn of_bundled_model() -> anyhow::Result<Self> {
        let model = Model::bundled().context("open the bundled model")?;
        let mut backend = CpuBackendOptions::default();
        backend.kv_dtype = Dtype::BF16;
        let mut engine = model.cpu_engine(&backend, EngineOptions::default())?;
        let (sender, ended) = mpsc::channel();
        engine.set_kv_sink(Box::new(Keeping(sender)));
        let sampling = SamplingParams {
            temperature: 1.0,
            seed: Some(1),
            ignore_eos: true,
            ..SamplingParams::greedy(CHUNK_TOKENS as u32 + 1)
        };
        engine.submit(GenerateRequest { prompt: vec![1], sampling })?;
        engine.run_until_idle()?;
        let sequence = ended.try_recv().context("take the KV of the text")?;
        let block_bytes = sequence.block_layer_bytes();
        let n_blocks = sequence.n_blocks().min(CHUNK_TOKENS / kvik_model::BLOCK_TOKENS);
        let mut raw = vec![0; sequence.n_layers() * n_blocks * block_bytes];
        for (idx, block) in raw.chunks_exact_mut(block_bytes).enumerate() {
            sequence.read_block(idx / n_blocks, idx % n_blocks, block)?;
        }
        let shape = ChunkShape::of_layout_name(
            &engine.kv_layout(),
            Dtype::BF16,
            sequence.n_layers(),
            n_blocks * kvik_model::BLOCK_TOKENS,
            block_bytes / kvik_model::BLOCK_TOKENS,
        );
        Ok(Self { shape, raw })
    }

    fn of_llama_8b(n_layers: usize) -> Self {
        let (n_kv_heads, head_dim) = (8, 128);
        let layout = ChunkLayout::KvikPaged { n_kv_heads, head_dim };
        let shape = ChunkShape { n_layers, n_tokens: CHUNK_TOKENS, dtype: Dtype::BF16, layout };
        Self { raw: synthetic::chunk(n_layers, CHUNK_TOKENS, n_kv_heads, head_dim), shape }
    }
}

impl KvSink for Keeping {
    fn offer(&mut self, sequence: EndedSequence) {
        // The other end waits for it; if it is gone, nothing does.
        let _ = self.0.send(sequence);
    }
}

fn decode_layers(
    codec: &dyn Codec,
    head: &CodedHead,
    coded: &[u8],
    back: &mut [u8],
) -> kvik_codec::Result<()> {
    for (layer, section) in back.chunks_exact_mut(head.shape.section_bytes()).enumerate() {
        let range = head.layer_range(layer..layer + 1);
        let bytes = &coded[range.start as usize..range.end as usize];
        codec.decode_layer(&head.shape, layer, bytes, section)?;
    }
    Ok(())
}

/// Billions of bytes a second.
fn rate_of(n_bytes: usize, work: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    work();
    n_bytes as f64 / begun.elapsed().as_secs_f64() / 1e9
}
