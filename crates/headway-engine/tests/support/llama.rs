//! A Llama, Mistral or Qwen3 in float64, in straight loops, with the testkit's attention and its masks: what the engine is
//! held against where no golden is.

use headway_engine::loading;
use headway_testkit::reference::{Params, Request, attend};
use serde_json::Value;
use std::{collections::HashMap, fs, ops::Range, path::Path};

pub struct Llama {
    config: Value,
    weights: HashMap<String, Vec<f64>>,
}

/// Rows of `x` through a weight `[out, in]`.
fn linear(x: &[f64], w: &[f64], width: usize) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum();
    x.chunks_exact(width).flat_map(|row| w.chunks_exact(width).map(move |w| dot(row, w))).collect()
}

impl Llama {
    pub fn open(dir: &Path) -> Self {
        let checkpoint = loading::open(dir).unwrap().checkpoint;
        let wide = |n: &str| checkpoint.get(n).unwrap().to_f32().into_iter().map(f64::from).collect();
        let weights = checkpoint.names().into_iter().map(|n| (n.to_owned(), wide(n))).collect();
        let config = serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
        Self { config, weights }
    }

    fn size(&self, field: &str) -> usize {
        self.config[field].as_u64().unwrap() as usize
    }

    fn norm(&self, x: &[f64], weight: &str) -> Vec<f64> {
        let (w, eps) = (&self.weights[weight], self.config["rms_norm_eps"].as_f64().unwrap());
        let row = |row: &[f64]| {
            let square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            let factor = (square + eps).sqrt().recip();
            row.iter().zip(w).map(|(x, w)| x * factor * w).collect::<Vec<_>>()
        };
        x.chunks_exact(w.len()).flat_map(row).collect()
    }

    /// Rotates heads of `d` elements, `heads` to a token.
    fn rotate(&self, x: &mut [f64], heads: usize, d: usize) {
        let theta = self.config["rope_theta"].as_f64().unwrap();
        for (i, head) in x.chunks_exact_mut(d).enumerate() {
            let position = (i / heads) as f64;
            let (a, b) = head.split_at_mut(d / 2);
            for (k, (a, b)) in a.iter_mut().zip(b).enumerate() {
                let (sin, cos) = (position * theta.powf(-2.0 * k as f64 / d as f64)).sin_cos();
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }

    /// A layer's window: the config's, in the layers that `layer_types` lists, where it lists any.
    pub fn window(&self, layer: usize) -> Option<usize> {
        let slides = self.config["layer_types"].get(layer).is_none_or(|t| t == "sliding_attention");
        self.config["sliding_window"].as_u64().filter(|_| slides).map(|w| w as usize)
    }

    /// Logits of the last token. `rswa`: window and prompt.
    pub fn logits(&self, tokens: &[u32], spans: &[Range<usize>], rswa: Option<(usize, usize)>) -> Vec<f64> {
        self.logits_with(tokens, |_| spans, rswa)
    }

    /// The same with ranges that see both ways of each layer's own.
    pub fn logits_with<'s>(
        &self,
        tokens: &[u32],
        spans: impl Fn(usize) -> &'s [Range<usize>],
        rswa: Option<(usize, usize)>,
    ) -> Vec<f64> {
        let (width, heads) = (self.size("hidden_size"), self.size("num_attention_heads"));
        let (kv_heads, d) = (self.size("num_key_value_heads"), self.size("head_dim"));
        let embedding = &self.weights["model.embed_tokens.weight"];
        let embed = |t: &u32| embedding[*t as usize * width..][..width].iter().copied();
        let mut x: Vec<f64> = tokens.iter().flat_map(embed).collect();
        let params = Params {
            num_heads: heads,
            num_kv_heads: kv_heads,
            head_size: d,
            head_size_v: d,
            scale: (d as f64).powf(-0.5),
            rswa_window: rswa.map(|r| r.0),
            ..Params::default()
        };
        for layer in 0..self.size("num_hidden_layers") {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            let w = |part: &str| &self.weights[&name(part)][..];
            let normed = self.norm(&x, &name("input_layernorm"));
            let [mut q, mut k, v] =
                ["q", "k", "v"].map(|p| linear(&normed, w(&format!("self_attn.{p}_proj")), width));
            for (x, part) in [(&mut q, "q"), (&mut k, "k")] {
                let norm = name(&format!("self_attn.{part}_norm"));
                if self.weights.contains_key(&norm) {
                    *x = self.norm(x, &norm);
                }
            }
            self.rotate(&mut q, heads, d);
            self.rotate(&mut k, kv_heads, d);
            let prefix = rswa.map_or(0, |r| r.1);
            let request = Request { q: &q, k: &k, v: &v, causal: true, spans: spans(layer), prefix };
            let params = Params { sliding_window: self.window(layer), ..params.clone() };
            let mixed = linear(&attend(&params, &request).out, w("self_attn.o_proj"), heads * d);
            x.iter_mut().zip(mixed).for_each(|(x, y)| *x += y);
            let normed = self.norm(&x, &name("post_attention_layernorm"));
            let [gate, up] = ["gate", "up"].map(|p| linear(&normed, w(&format!("mlp.{p}_proj")), width));
            let gated: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let out = linear(&gated, w("mlp.down_proj"), self.size("intermediate_size"));
            x.iter_mut().zip(out).for_each(|(x, y)| *x += y);
        }
        let last = self.norm(&x[x.len() - width..], "model.norm.weight");
        linear(&last, self.weights.get("lm_head.weight").unwrap_or(embedding), width)
    }
}
