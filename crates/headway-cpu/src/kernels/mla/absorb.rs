//! Into the latent space and out of it: q·(W_UK c) = (W_UKᵀ q)·c, and Σ p W_UV c = W_UV Σ p c, so that no key or value
//! of a cached token is ever made. The two matrices of each head are taken out of `kv_b_proj` once, at load.

use super::Dims;
use crate::{
    CpuExec,
    kernels::{elementwise::rows::Rows, linear::CpuLinear},
};
use headway_tensor::{Linear, Result, SharedBytes, TensorError, TensorRef, Weight};
use std::any::Any;

/// `kv_b_proj` by head: W_UKᵀ `[rank, nope]` and W_UV `[v, rank]`.
pub struct Absorbed {
    dims: Dims,
    keys: Vec<CpuLinear>,
    values: Vec<CpuLinear>,
    bytes: usize,
}

impl Absorbed {
    /// Takes `kv_b_proj` apart. W_UV shares the file's bytes where they are dense; W_UKᵀ is a turned copy.
    ///
    /// # Errors
    /// A layer of another shape than `[heads x (nope + v), rank]`, one with biases, or one of another device.
    pub fn new(kv_b_proj: &dyn Linear, dims: &Dims) -> Result<Self> {
        let w: Option<&CpuLinear> = (kv_b_proj as &dyn Any).downcast_ref();
        let w = w.ok_or_else(|| {
            TensorError::Unsupported("a kv_b_proj that was loaded for another device".into())
        })?;
        if (w.in_features(), w.out_features()) != (dims.rank, dims.expanded()) {
            return Err(TensorError::WrongShape {
                what: "kv_b_proj".into(),
                found: vec![w.out_features(), w.in_features()],
                expected: format!("[{} x ({} + {}), {}]", dims.heads, dims.nope, dims.v, dims.rank),
            });
        }
        let (mut keys, mut values, mut bytes) = (vec![], vec![], 0);
        for head in 0..dims.heads {
            let first = head * (dims.nope + dims.v);
            let key = turned(&w.columns(first..first + dims.nope)?)?;
            let value = w.columns(first + dims.nope..first + dims.nope + dims.v)?;
            bytes += key.bytes().len();
            if w.bytes() > 0 {
                bytes += value.bytes().len();
            }
            keys.push(CpuLinear::dense(key)?);
            values.push(CpuLinear::dense(value)?);
        }
        Ok(Self { dims: *dims, keys, values, bytes })
    }

    /// Bytes held beyond those of `kv_b_proj`.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Queries `[tokens, heads, nope + rope]` in float32, into the latent space: `out` is
    /// `[heads, tokens, rank + rope]`, with the rotary part as it is.
    ///
    /// # Errors
    /// Another dtype or shape; too little room.
    pub fn queries(&self, cx: &CpuExec, q: TensorRef<'_>, out: &mut [f32]) -> Result<()> {
        let d = &self.dims;
        let (tokens, token_stride, head_stride) = match (q.shape(), q.strides()) {
            (&[tokens, heads, size], &[t, h, 1]) if heads == d.heads && size == d.qk() => (tokens, t, h),
            (shape, _) => {
                return Err(TensorError::WrongShape {
                    what: "latent attention query".into(),
                    found: shape.to_vec(),
                    expected: format!("[tokens, {}, {}]", d.heads, d.qk()),
                });
            }
        };
        let q = q.into_host::<f32>()?;
        if tokens == 0 {
            return Ok(());
        }
        let xs = Rows::new("latent query", &[tokens, d.nope], &[token_stride, 1])?;
        let outs = Rows::new("latent query", &[tokens, d.rank], &[d.latent(), 1])?;
        let out = room(out, d.heads * tokens * d.latent())?;
        cx.pool().run_chunks(out, tokens * d.latent(), &|head, out, _| {
            let q = &q[head * head_stride..];
            self.keys[head].forward(cx, q, &xs, out, &outs);
            for (t, row) in out.chunks_exact_mut(d.latent()).enumerate() {
                let at = t * token_stride + d.nope;
                row[d.rank..].copy_from_slice(&q[at..at + d.rope]);
            }
        });
        Ok(())
    }

    /// Weighted latents `[heads, tokens, rank]` out of the latent space: `out` is `[heads, tokens, v]`.
    ///
    /// # Errors
    /// Too few latents, too little room.
    pub fn values(&self, cx: &CpuExec, latents: &[f32], tokens: usize, out: &mut [f32]) -> Result<()> {
        let d = &self.dims;
        if tokens == 0 {
            return Ok(());
        }
        let xs = Rows::new("weighted latents", &[tokens, d.rank], &[d.rank, 1])?;
        let outs = Rows::new("values", &[tokens, d.v], &[d.v, 1])?;
        if latents.len() < d.heads * tokens * d.rank {
            return Err(TensorError::Unsupported(format!(
                "{} weighted latents for {tokens} tokens",
                latents.len()
            )));
        }
        let out = room(out, d.heads * tokens * d.v)?;
        cx.pool().run_chunks(out, tokens * d.v, &|head, out, _| {
            self.values[head].forward(cx, &latents[head * tokens * d.rank..], &xs, out, &outs);
        });
        Ok(())
    }
}

impl std::fmt::Debug for Absorbed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Absorbed({:?}, {} bytes)", self.dims, self.bytes)
    }
}

fn room(out: &mut [f32], wanted: usize) -> Result<&mut [f32]> {
    let have = out.len();
    out.get_mut(..wanted).ok_or_else(|| {
        TensorError::Unsupported(format!("a buffer of {have} elements where {wanted} are needed"))
    })
}

/// The matrix with rows and columns changed, in its own type.
fn turned(w: &Weight) -> Result<Weight> {
    let (rows, cols) = (w.rows(), w.cols());
    let size = w.row_bytes() / cols;
    let from = w.bytes().as_slice();
    let mut to = vec![0u8; from.len()];
    for r in 0..rows {
        for c in 0..cols {
            let (a, b) = ((r * cols + c) * size, (c * rows + r) * size);
            to[b..b + size].copy_from_slice(&from[a..a + size]);
        }
    }
    Weight::new(w.name(), w.dtype(), vec![cols, rows], SharedBytes::from(to))
        .map_err(|e| TensorError::Unsupported(e.to_string()))
}
