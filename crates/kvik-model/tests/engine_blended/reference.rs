//! A Llama in double precision, row by row, as plain as can be.

use kvik_model::{Checkpoint, ModelConfig, Position};

/// Keys and values of every layer and position, once they are computed.
pub(crate) type Cache = Vec<Vec<Option<(Vec<f64>, Vec<f64>)>>>;

/// The weights of a Llama without biases.
pub(crate) struct Reference<'a> {
    config: &'a ModelConfig,
    checkpoint: &'a Checkpoint,
    frequencies: Vec<f64>,
}

impl<'a> Reference<'a> {
    pub(crate) fn new(config: &'a ModelConfig, checkpoint: &'a Checkpoint) -> Self {
        let Position::Rope(rope) = &config.position else { panic!("a model without rotary positions") };
        let frequencies = rope.inverse_frequencies(config.head_dim).into_iter().map(f64::from).collect();
        Self { config, checkpoint, frequencies }
    }

    pub(crate) fn empty_cache(&self, n_tokens: usize) -> Cache {
        vec![vec![None; n_tokens]; self.config.n_layers]
    }

    /// Computes the row of `token`, puts its keys and values into the cache and returns its logits. It sees the positions for
    /// which `sees` holds.
    pub(crate) fn row(
        &self,
        token: u32,
        position: usize,
        sees: &dyn Fn(usize) -> bool,
        cache: &mut Cache,
    ) -> Vec<f64> {
        let hidden_size = self.config.hidden_size;
        let mut hidden =
            self.weights("model.embed_tokens.weight")[token as usize * hidden_size..][..hidden_size].to_vec();
        for (layer_idx, layer) in cache.iter_mut().enumerate() {
            let name = |part: &str| format!("model.layers.{layer_idx}.{part}.weight");
            let x = self.normalized(&hidden, &name("input_layernorm"));
            let mut query = self.product(&name("self_attn.q_proj"), &x);
            let mut key = self.product(&name("self_attn.k_proj"), &x);
            let value = self.product(&name("self_attn.v_proj"), &x);
            self.rotate(&mut query, position);
            self.rotate(&mut key, position);
            layer[position] = Some((key, value));
            let attended = self.attend(&query, layer, &|seen| seen <= position && sees(seen));
            add(&mut hidden, &self.product(&name("self_attn.o_proj"), &attended));
            let x = self.normalized(&hidden, &name("post_attention_layernorm"));
            let gate = self.product(&name("mlp.gate_proj"), &x);
            let up = self.product(&name("mlp.up_proj"), &x);
            let inner: Vec<f64> =
                gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
            add(&mut hidden, &self.product(&name("mlp.down_proj"), &inner));
        }
        let x = self.normalized(&hidden, "model.norm.weight");
        self.product("lm_head.weight", &x)
    }

    fn attend(
        &self,
        query: &[f64],
        layer: &[Option<(Vec<f64>, Vec<f64>)>],
        sees: &dyn Fn(usize) -> bool,
    ) -> Vec<f64> {
        let head_dim = self.config.head_dim;
        let per_kv_head = self.config.n_query_heads / self.config.n_kv_heads;
        let mut out = vec![0.0; query.len()];
        for head in 0..self.config.n_query_heads {
            let query = &query[head * head_dim..][..head_dim];
            let column = head / per_kv_head * head_dim;
            let seen: Vec<&(Vec<f64>, Vec<f64>)> = layer
                .iter()
                .enumerate()
                .filter(|(at, _)| sees(*at))
                .filter_map(|(_, kv)| kv.as_ref())
                .collect();
            let scores: Vec<f64> = seen
                .iter()
                .map(|(key, _)| dot(query, &key[column..][..head_dim]) / (head_dim as f64).sqrt())
                .collect();
            let sum: f64 = scores.iter().map(|score| score.exp()).sum();
            for ((_, value), score) in seen.iter().zip(&scores) {
                for (dim, out) in out[head * head_dim..][..head_dim].iter_mut().enumerate() {
                    *out += score.exp() / sum * value[column + dim];
                }
            }
        }
        out
    }

    fn rotate(&self, heads: &mut [f64], position: usize) {
        let half = self.config.head_dim / 2;
        for head in heads.chunks_exact_mut(2 * half) {
            for (pair, frequency) in self.frequencies.iter().enumerate() {
                let (sine, cosine) = (position as f64 * frequency).sin_cos();
                let (x, y) = (head[pair], head[pair + half]);
                (head[pair], head[pair + half]) = (x * cosine - y * sine, y * cosine + x * sine);
            }
        }
    }

    fn normalized(&self, x: &[f64], name: &str) -> Vec<f64> {
        let epsilon = 1e-5;
        let scale = 1.0 / (dot(x, x) / x.len() as f64 + epsilon).sqrt();
        x.iter().zip(self.weights(name)).map(|(x, weight)| x * scale * weight).collect()
    }

    fn product(&self, name: &str, x: &[f64]) -> Vec<f64> {
        self.weights(name).chunks_exact(x.len()).map(|row| dot(row, x)).collect()
    }

    fn weights(&self, name: &str) -> Vec<f64> {
        self.checkpoint.read(name).unwrap().to_f32().into_iter().map(f64::from).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], what: &[f64]) {
    to.iter_mut().zip(what).for_each(|(to, what)| *to += what);
}
