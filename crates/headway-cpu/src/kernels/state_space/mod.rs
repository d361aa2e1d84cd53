//! Mamba-2 on the CPU (Dao and Gu, 2024, arXiv 2405.21060): causal convolution with a state, a scan in
//! chunks for prefills, and a single step for decodes, whose cost is that of the state whatever the context.
//!
//! The arithmetic is float32 throughout; states are read from and rounded to their own types. A request's
//! result depends on no other row and not on the threads. How its prompt is cut into chunks changes the
//! order of sums, so its last bits; with `stepwise` prefills take single steps too and nothing changes.
//!
//! | file | what |
//! |---|---|
//! | `shape`, `elem` | sizes of a layer and of a state, element types |
//! | `plan` | a step's requests, and the blocks of their states |
//! | `conv`, `scan`, `step` | the arithmetic, on slices |
//! | `product` | small matrix products of the scan |
//! | `entry` | the same, compiled for each instruction set |
//! | `run` | tasks over requests, channels and heads |

mod conv;
mod elem;
mod entry;
mod plan;
mod product;
mod run;
mod scan;
mod shape;
mod step;
mod workspace;

pub use plan::{Plan, Request, States};
pub use shape::{MAX_CONV_KERNEL, StatePage};
pub use workspace::Workspace;

use crate::{Isa, kernels::elementwise::rows::Rows, pool::Pool};
use headway_attention::{AttentionError, Result};
use headway_tensor::{DType, TensorError, TensorMut, TensorRef};

/// One layer's numbers, all in float32.
#[derive(Clone, Debug)]
pub struct Numbers {
    /// `[conv_kernel, conv_dim]`: the convolution's weights, tap after tap.
    pub conv_weight: Vec<f32>,
    /// `[conv_dim]`.
    pub conv_bias: Vec<f32>,
    /// `[heads]`: decay, below 0.
    pub a: Vec<f32>,
    /// `[heads]`: skip weights.
    pub d: Vec<f32>,
    /// `[heads]`.
    pub dt_bias: Vec<f32>,
    /// Least and most of dt after its softplus.
    pub dt_limit: (f32, f32),
}

/// A layer's states: block b begins `offset + b * block_stride` bytes into the cache.
#[derive(Clone, Copy, Debug)]
pub struct StateCache {
    /// Bytes before block 0.
    pub offset: usize,
    /// Bytes from one block to the next.
    pub block_stride: usize,
    /// Blocks.
    pub num_blocks: usize,
    /// What a block holds.
    pub page: StatePage,
}

/// What runs a layer, and how.
#[derive(Clone, Copy, Debug)]
pub struct On<'a> {
    /// The threads.
    pub pool: &'a Pool,
    /// The instruction set.
    pub isa: Isa,
    /// Prefills advance token by token, as decodes do.
    pub stepwise: bool,
}

/// A group's batch, with the memory that its layers run in.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// The requests.
    pub plan: &'a Plan,
    /// Where their states are.
    pub states: &'a States,
    /// Memory.
    pub workspace: &'a Workspace,
}

/// Convolution and scan of a layer: x is `[tokens, conv_dim + heads]` (xBC, then dt), out `[tokens, inner]`,
/// both float32. States are read and written; rows of no request become zero.
///
/// # Errors
/// Shapes and types that don't fit the layer; states outside the cache; a step larger than the workspace.
pub fn mix(
    on: On<'_>,
    batch: &Batch<'_>,
    numbers: &Numbers,
    x: TensorRef<'_>,
    cache: (&StateCache, &mut [u8]),
    out: TensorMut<'_>,
) -> Result<()> {
    let (places, bytes) = cache;
    let dims = *places.page.dims();
    let (tokens, width) = (x.shape().first().copied().unwrap_or(0), dims.conv_dim() + dims.heads);
    let (xs, x) = f32_rows("state-space input", x, [tokens, width])?;
    let (ys, out) = f32_rows_mut("state-space output", out, [tokens, dims.inner()])?;
    let w = batch.workspace;
    let end = batch.plan.rows();
    if !on.isa.is_available() {
        return Err(inputs(format!("kernels for {} can't run on this machine", on.isa)));
    }
    if !batch.states.is_of(batch.plan) {
        return Err(inputs("states of another step".into()));
    }
    if *w.dims() != dims {
        return Err(inputs("metadata of a group with other layers".into()));
    }
    if end > tokens || end > w.max_tokens {
        return Err(inputs(format!(
            "requests of {end} tokens; the input has {tokens}, the workspace room for {}",
            w.max_tokens
        )));
    }
    if batch.plan.longest_chunk() > w.room.chunk {
        return Err(inputs(format!("a chunk of more than the workspace's {} tokens", w.room.chunk)));
    }
    if batch.states.largest() >= places.num_blocks.max(1) {
        return Err(inputs(format!(
            "a state in block {}; the cache has {}",
            batch.states.largest(),
            places.num_blocks
        )));
    }
    let last = places.block_stride.checked_mul(places.num_blocks.saturating_sub(1));
    let needed = last.and_then(|l| l.checked_add(places.offset + places.page.bytes()));
    let apart = places.num_blocks <= 1 || places.block_stride >= places.page.bytes();
    if needed.is_none_or(|n| n > bytes.len()) || !apart {
        return Err(AttentionError::KvCache(format!(
            "{} states of {} bytes, {} apart, don't fit a cache of {} bytes",
            places.num_blocks,
            places.page.bytes(),
            places.block_stride,
            bytes.len()
        )));
    }
    for row in end..tokens {
        out[ys.range(row)].fill(0.0);
    }
    run::run(on, batch, numbers, (&xs, x), (places, bytes), (&ys, out))
}

fn inputs(why: String) -> AttentionError {
    AttentionError::Inputs(why)
}

fn f32_rows<'a>(what: &'static str, x: TensorRef<'a>, shape: [usize; 2]) -> Result<(Rows, &'a [f32])> {
    check(what, x.dtype(), x.shape(), shape)?;
    Ok((Rows::new(what, x.shape(), x.strides())?, x.into_host()?))
}

fn f32_rows_mut<'a>(
    what: &'static str,
    x: TensorMut<'a>,
    shape: [usize; 2],
) -> Result<(Rows, &'a mut [f32])> {
    check(what, x.dtype(), x.shape(), shape)?;
    Ok((Rows::new(what, x.shape(), x.as_ref().strides())?, x.into_host()?))
}

fn check(what: &'static str, dtype: DType, found: &[usize], shape: [usize; 2]) -> Result<()> {
    if dtype != DType::F32 {
        return Err(TensorError::WrongDType { what, found: dtype, supported: "float32" }.into());
    }
    if found != shape {
        return Err(TensorError::WrongShape {
            what: what.into(),
            found: found.to_vec(),
            expected: format!("{shape:?}"),
        }
        .into());
    }
    Ok(())
}
