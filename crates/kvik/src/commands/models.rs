//! `kvik models`: what a model is and what its KV costs.

use std::io::Write;

use anyhow::Context;
use kvik_model::{Checkpoint, Model, ModelConfig, Position, RopeScaling};
use kvik_types::{ByteSize, Dtype, TokenId};
use serde::Serialize;

use super::{kv_bytes_per_token, open_model, print_json};
use crate::cli::generate::KvDtype;
use crate::cli::models::{InspectArguments, MakeArguments, ModelShape};
use kvik_runtime::terminal::{self, Align, Column, Table, grouped};

/// What `models inspect` tells; the object that `--json` prints.
#[derive(Debug, Serialize)]
struct Inspection {
    model: String,
    architecture: &'static str,
    parameters: u64,
    weight_bytes: u64,
    /// The dtypes of the tensors, the one with most elements first.
    weight_dtypes: Vec<String>,
    layers: usize,
    hidden_size: usize,
    intermediate_size: usize,
    query_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocabulary: usize,
    context_tokens: usize,
    positions: String,
    /// Per layer, in tokens; `null`: the layer sees the whole context.
    sliding_windows: Vec<Option<usize>>,
    tied_embeddings: bool,
    chat_template: bool,
    eos_tokens: Vec<EosToken>,
    kv: Vec<KvCost>,
}

#[derive(Debug, Serialize)]
struct EosToken {
    id: TokenId,
    /// As the vocabulary writes it.
    token: Option<String>,
}

#[derive(Debug, Serialize)]
struct KvCost {
    dtype: &'static str,
    bytes_per_token: u64,
    bytes_per_context: u64,
}

/// Runs `kvik models inspect`.
pub(crate) fn inspect(arguments: &InspectArguments) -> anyhow::Result<()> {
    let model = open_model(arguments.model.as_deref())?;
    let inspection = Inspection::of(&model);
    if arguments.json {
        return print_json(&inspection);
    }
    let mut stdout = anstream::stdout().lock();
    inspection.write(&mut stdout).and_then(|()| stdout.flush()).context("write to standard output")
}

/// Runs `kvik models make`.
pub(crate) fn make(arguments: &MakeArguments) -> anyhow::Result<()> {
    let folder = &arguments.random;
    std::fs::create_dir(folder).with_context(|| format!("make {}", folder.display()))?;
    let config = serde_json::to_string_pretty(&config_of(arguments.shape, arguments.seed))?;
    Model::write_random(folder, &config).context("write the model")?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}: weights are made on the device when the model is loaded", folder.display())?;
    Ok(())
}

/// `config.json` of a model of this shape with random weights.
fn config_of(shape: ModelShape, seed: u64) -> serde_json::Value {
    let (hidden, intermediate, layers, query_heads, head_dim, is_tied) = match shape {
        ModelShape::Llama32With1B => (2048, 8192, 16, 32, 64, true),
        ModelShape::Llama32With3B => (3072, 8192, 28, 24, 128, true),
        ModelShape::Llama3With8B => (4096, 14336, 32, 32, 128, false),
    };
    serde_json::json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": is_tied,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 0,
        "kvik": {"random_weights": seed},
    })
}

impl Inspection {
    fn of(model: &Model) -> Self {
        let config = model.config();
        let checkpoint = model.checkpoint();
        let tokenizer = model.tokenizer();
        let mut eos_token_ids = tokenizer.eos_token_ids().to_vec();
        for &id in &config.eos_token_ids {
            if !eos_token_ids.contains(&id) {
                eos_token_ids.push(id);
            }
        }
        let eos_token = |id: TokenId| EosToken { id, token: tokenizer.token_text(id) };
        Self {
            model: model.name().to_owned(),
            architecture: config.architecture.class_name(),
            parameters: checkpoint.n_parameters(),
            weight_bytes: checkpoint.total_bytes(),
            weight_dtypes: weight_dtypes(checkpoint),
            layers: config.n_layers,
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            query_heads: config.n_query_heads,
            kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            vocabulary: config.vocab_size,
            context_tokens: config.max_positions,
            positions: positions(&config.position),
            sliding_windows: config.sliding_windows.clone(),
            tied_embeddings: config.ties_embeddings,
            chat_template: tokenizer.has_chat_template(),
            eos_tokens: eos_token_ids.into_iter().map(eos_token).collect(),
            kv: KvDtype::ALL.map(|kv_dtype| KvCost::of(config, kv_dtype.into())).into(),
        }
    }

    fn write(&self, output: &mut impl Write) -> std::io::Result<()> {
        let title = terminal::TITLE;
        writeln!(output, "{title}{}{title:#}", self.model)?;
        let mut facts = Table::new(vec![
            Column::new("", Align::Left).with_style(terminal::DIMMED),
            Column::new("", Align::Left),
        ]);
        let number = |count: usize| grouped(count as u64);
        let yes_or_no = |is_so: bool| if is_so { "yes" } else { "no" }.to_owned();
        let rows = [
            ("architecture", self.architecture.to_owned()),
            ("parameters", grouped(self.parameters)),
            ("weights", format!("{} in {}", ByteSize(self.weight_bytes), self.weight_dtypes.join(", "))),
            ("layers", number(self.layers)),
            ("hidden size", number(self.hidden_size)),
            ("feed-forward size", number(self.intermediate_size)),
            ("heads", format!("{} query, {} key/value", self.query_heads, self.kv_heads)),
            ("head size", number(self.head_dim)),
            ("vocabulary", format!("{} tokens", number(self.vocabulary))),
            ("context", format!("{} tokens", number(self.context_tokens))),
            ("positions", self.positions.clone()),
            ("sliding windows", windows(&self.sliding_windows)),
            ("tied embeddings", yes_or_no(self.tied_embeddings)),
            ("chat template", yes_or_no(self.chat_template)),
            ("end tokens", end_tokens(&self.eos_tokens)),
        ];
        for (name, value) in rows {
            facts.push([name.to_owned(), value]);
        }
        facts.write(output)?;

        writeln!(output, "\n{title}KV cache{title:#}")?;
        let mut costs = Table::new(vec![
            Column::new("dtype", Align::Left),
            Column::new("bytes per token", Align::Right),
            Column::new("full context", Align::Right),
        ]);
        for cost in &self.kv {
            costs.push([
                cost.dtype.to_owned(),
                grouped(cost.bytes_per_token),
                ByteSize(cost.bytes_per_context).to_string(),
            ]);
        }
        costs.write(output)
    }
}

impl KvCost {
    fn of(config: &ModelConfig, kv_dtype: Dtype) -> Self {
        let bytes_per_token = kv_bytes_per_token(config, kv_dtype);
        Self {
            dtype: kv_dtype.name(),
            bytes_per_token,
            bytes_per_context: bytes_per_token.saturating_mul(config.max_positions as u64),
        }
    }
}

fn weight_dtypes(checkpoint: &Checkpoint) -> Vec<String> {
    let mut dtypes: Vec<(String, usize)> = Vec::new();
    for info in checkpoint.names().filter_map(|name| checkpoint.tensor_info(name)) {
        let name = info.dtype.to_string().to_ascii_lowercase();
        match dtypes.iter_mut().find(|(known, _)| *known == name) {
            Some((_, n_elements)) => *n_elements = n_elements.saturating_add(info.n_elements()),
            None => dtypes.push((name, info.n_elements())),
        }
    }
    dtypes.sort_by_key(|(_, n_elements)| std::cmp::Reverse(*n_elements));
    dtypes.into_iter().map(|(name, _)| name).collect()
}

fn positions(position: &Position) -> String {
    let rope = match position {
        Position::Learned => return "learned".to_owned(),
        Position::Rope(rope) => rope,
    };
    let scaling = match &rope.scaling {
        RopeScaling::None => String::new(),
        RopeScaling::Linear { factor } => format!(", linear scaling by {factor}"),
        RopeScaling::Llama3 { factor, original_max_positions, .. } => {
            format!(", llama3 scaling by {factor} from {original_max_positions} tokens")
        }
    };
    format!("rope, theta {}{scaling}", rope.theta)
}

fn windows(windows: &[Option<usize>]) -> String {
    let Some(first) = windows.iter().flatten().next() else {
        return "none".to_owned();
    };
    let n_layers = windows.iter().flatten().count();
    let sizes = if windows.iter().flatten().all(|window| window == first) {
        grouped(*first as u64)
    } else {
        "various".to_owned()
    };
    if n_layers == windows.len() {
        format!("{sizes} tokens in every layer")
    } else {
        format!("{sizes} tokens in {n_layers} of {} layers", windows.len())
    }
}

fn end_tokens(tokens: &[EosToken]) -> String {
    if tokens.is_empty() {
        return "none".to_owned();
    }
    let text = |token: &EosToken| match &token.token {
        Some(text) => format!("{} {}", token.id, text.escape_debug()),
        None => token.id.to_string(),
    };
    tokens.iter().map(text).collect::<Vec<_>>().join(", ")
}
