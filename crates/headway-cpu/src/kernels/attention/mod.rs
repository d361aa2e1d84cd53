//! Paged attention on the CPU: decode, prefill, chunked prefill and mixed batches in one call.
//!
//! The path of a call: [`Plan`] (once a step: what is to be done, in pieces) → [`Batch`] (the plan with
//! a block table that was checked against it) → [`attend`] (once a layer: checks, then `item` on every
//! worker). [`write_kv`] puts new keys and values into the cache.
//!
//! # Layout of a page
//! `LBHNC`: block b, key/value head h. Inside one (block, head) first the keys, in groups of 16 tokens
//! with the token inside the channel, so that 16 scores grow side by side without a horizontal sum; then
//! the values, the column inside the token. The cache's element type decides what lies innermost, the
//! instruction set nothing:
//!
//! | cache | keys | values |
//! |---|---|---|
//! | float32, float16, 8-bit | `[block_size / 16, head_size, 16]` | `[block_size, head_size_v]` |
//! | bfloat16 | `[block_size / 16, head_size / 2, 16, 2]`: pairs of channels | `[block_size / 2, head_size_v, 2]`: pairs of tokens |
//!
//! So element `d` of the key of token `t` (in the block) is element `((t / 16 · head_size / u + d / u) · 16 +
//! t % 16) · u + d % u` of the head's part of the page, with u = 2 for bfloat16 and 1 otherwise, and column `c` of
//! its value element `block_size · head_size + (t / u · head_size_v + c) · u + t % u`. In bfloat16 the two
//! elements of a sum's next two steps thus share 32 bits: a shift and a mask widen them, and dot-product
//! instructions on pairs (AVX512-BF16, AMX) take them as they lie, keys as the second factor of q·k and values
//! as that of weights·v. A token of a pair that was not written yet holds anything, and is never computed with.
//!
//! Blocks hold a multiple of 16 tokens. A page has `block_size · heads · (head_size + head_size_v)` elements.
//!
//! A latent page ([`Form::Latent`], for MLA) is token-major, `[block_size, rank + rope]`, without padding: all heads
//! read the row as key, and its first `rank` elements as value. A tile is turned into the two forms above once for all
//! heads of a token, in float32.
//!
//! # Bounds
//! Decode reads every key and value once: the memory's bandwidth, as long as a group's query heads times
//! two multiply-adds an element keep below the core's rate. Blocks lie anywhere, so reading asks for the lines
//! of the next tile with those of this one (`micro`). Prefill reads a tile into the nearest cache for up to 96
//! rows: the rate of multiply-adds.
//! Over latents a decode is bound by multiply-adds too, once a model has more than about 16 heads: each element
//! that is read takes part in two of them a head.
//!
//! # Sameness
//! A row's bits depend on its query, its keys and values, the layer and the instruction set alone: see
//! `plan`, `micro` and, for AMX, `tiles`. So batch invariance costs nothing and is always on.

#[expect(clippy::needless_range_loop, reason = "one index runs over units and over places")]
mod convert;
mod elem;
mod entry;
mod item;
mod job;
mod lanes;
mod level;
mod math;
mod merge;
#[expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]
mod micro;
mod narrow;
mod pack;
mod pass;
mod place;
mod plan;
mod shape;
mod sight;
mod soften;
mod tile;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod workspace;
mod write;

pub use micro::GROUP;
pub use plan::{CHUNK, Plan, Request};
pub use shape::{Form, Shape};
pub use sight::Masks;
pub use workspace::Workspace;
pub use write::{write_kv, write_latent};

use crate::{Isa, pool::Pool};
use headway_attention::{AttentionError, Result};
use headway_tensor::{DType, RowQuant, TensorError, TensorMut, TensorRef, View};
use job::{BadBlock, CacheMap, Job, Rows};
use std::sync::Arc;
use workspace::Inner;

/// One layer's numbers.
#[derive(Clone, Copy, Debug)]
pub struct LayerNumbers<'a> {
    /// Factor on q·k.
    pub scale: f32,
    /// Position i sees j only where `i - window < j`.
    pub window: Option<usize>,
    /// `cap · tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// `[num_heads]`.
    pub alibi_slopes: Option<&'a [f32]>,
    /// `[num_heads]`.
    pub sinks: Option<&'a [f32]>,
    /// Factor on stored keys.
    pub k_scale: f32,
    /// Factor on stored values.
    pub v_scale: f32,
}

/// Where a layer's cache lies in its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    /// Bytes before block 0.
    pub offset: usize,
    /// Bytes from one block to the next.
    pub block_stride: usize,
    /// Blocks.
    pub num_blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Element type.
    pub dtype: DType,
}

/// What becomes of the log-sum-exps of a call, `[rows of the plan, heads]`.
#[derive(Debug)]
pub enum Lse<'a> {
    /// They are not wanted.
    None,
    /// They are written.
    Write(&'a mut [f32]),
    /// Output and log-sum-exps hold the result over other keys (0 and minus infinity: none so far): both become
    /// those over all keys. Rows that see no key here stay as they are.
    Merge(&'a mut [f32]),
}

/// Where a call's result goes: `[tokens, heads, head_size_v]`.
pub enum Output<'a> {
    /// In the type of the queries.
    Plain(TensorMut<'a>),
    /// As 8-bit codes, quantised where a row is finished; `scales` `[tokens, heads, scales of a head]` takes what the
    /// rule makes.
    Codes {
        /// The rule.
        quant: RowQuant,
        /// Of the rule's type.
        codes: TensorMut<'a>,
        /// Contiguous.
        scales: &'a mut [f32],
    },
}

impl<'a> From<TensorMut<'a>> for Output<'a> {
    fn from(out: TensorMut<'a>) -> Self {
        Self::Plain(out)
    }
}

fn inputs(what: impl Into<String>) -> AttentionError {
    AttentionError::Inputs(what.into())
}

impl CacheLayout {
    /// Bytes of one block of one key/value head: keys, then values; of a latent block, all of it. Fits, once
    /// [`CacheLayout::check`] has passed.
    fn head_bytes(&self, shape: &Shape) -> usize {
        self.block_size * shape.token_elements() / shape.num_kv_heads * self.dtype.size()
    }

    /// Checks that every block lies in a buffer of `len` bytes.
    fn check(&self, shape: &Shape, len: usize) -> Result<()> {
        if self.block_size == 0 || !self.block_size.is_multiple_of(GROUP) {
            return Err(inputs(format!(
                "blocks of {} tokens; the kernel takes multiples of {GROUP}",
                self.block_size
            )));
        }
        let page = self.block_size.checked_mul(shape.token_elements() * self.dtype.size());
        let end = self
            .num_blocks
            .checked_sub(1)
            .map_or(Some(0), |last| last.checked_mul(self.block_stride)?.checked_add(page?))
            .and_then(|e| e.checked_add(self.offset));
        if end.is_none_or(|e| e > len) || page.is_none_or(|p| self.num_blocks > 1 && p > self.block_stride) {
            return Err(AttentionError::KvCache(format!(
                "{} blocks of {} tokens, {} bytes apart, do not fit a KV cache of {len} bytes",
                self.num_blocks, self.block_size, self.block_stride
            )));
        }
        Ok(())
    }
}

/// A step's plan with the block table that it reads, checked against each other once.
#[derive(Clone, Debug)]
pub struct Batch {
    plan: Arc<Plan>,
    table: View<i32>,
    stride: usize,
    block_size: usize,
}

impl Batch {
    /// Checks that the table (`[requests, stride]`, on the host) has a place for every token that a row
    /// of the plan can see. The numbers in it are checked where they are read, so that a step costs nothing
    /// for blocks that stay.
    ///
    /// # Errors
    /// A table that is too small, or on a device.
    pub fn new(plan: Arc<Plan>, table: View<i32>, stride: usize, block_size: usize) -> Result<Self> {
        let len = table.host().ok_or_else(|| inputs("the block table is not on the host"))?.len();
        if block_size == 0 {
            return Err(inputs("blocks of no tokens"));
        }
        let fits = |tokens: usize| tokens.div_ceil(block_size) <= stride;
        if !fits(plan.most_keys()) || plan.requests().len().checked_mul(stride).is_none_or(|n| n > len) {
            let requests = plan.requests().iter().enumerate();
            let too_long = requests.clone().find(|(i, r)| !fits(r.seq_len) || (i + 1) * stride > len);
            let (i, r) =
                too_long.or_else(|| requests.clone().next_back()).ok_or_else(|| inputs("no requests"))?;
            return Err(inputs(format!(
                "request {i} has {} tokens, more than its row of the block table",
                r.seq_len
            )));
        }
        Ok(Self { plan, table, stride, block_size })
    }

    /// The plan.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Checks a layer's cache and window against the step.
    fn check(&self, layer: &LayerNumbers<'_>, cache: &CacheLayout) -> Result<()> {
        if cache.block_size != self.block_size {
            return Err(inputs(format!(
                "a cache with blocks of {} tokens, metadata for blocks of {}",
                cache.block_size, self.block_size
            )));
        }
        if cache.num_blocks == 0 && self.plan.most_keys() > 0 {
            return Err(inputs("a cache without blocks"));
        }
        match (self.plan.window(), layer.window) {
            (Some(group), layer) if layer.is_none_or(|w| w > group) => Err(inputs(format!(
                "a layer sees further back than the window of {group} tokens that its group keeps"
            ))),
            _ => Ok(()),
        }
    }
}

/// Attention of every row of `q` `[tokens, heads, head_size]` over its request's keys and values in the
/// cache, into `out` `[tokens, heads, head_size_v]`; rows past the plan's are zeroed. `lse`
/// `[rows of the plan, heads]` takes the natural log of each row's denominator, a sink included (minus
/// infinity where a row sees neither).
///
/// # Errors
/// Shapes, dtypes and devices; a cache, plan or workspace that doesn't fit the others; an earlier result to merge
/// with that isn't float32, or sinks or a scale on the values beside it. A block that the cache doesn't have:
/// `out` then holds rows of no meaning.
pub fn attend<'o>(
    (pool, isa): (&Pool, Isa),
    batch: &Batch,
    workspace: &Workspace,
    layer: &LayerNumbers<'_>,
    q: TensorRef<'_>,
    (cache, bytes): (&CacheLayout, &[u8]),
    out: impl Into<Output<'o>>,
    lse: Lse<'_>,
) -> Result<()> {
    let (mut out, quant, scales) = match out.into() {
        Output::Plain(out) => (out, None, &mut [][..]),
        Output::Codes { quant, codes, scales } => (codes, Some(quant), scales),
    };
    let shape = *batch.plan.shape().ok_or_else(|| inputs("a plan that was never built"))?;
    if workspace.shape() != &shape {
        return Err(inputs("metadata of another group: its plan doesn't fit the workspace"));
    }
    batch.check(layer, cache)?;
    if batch.plan.rswa_window().is_some() && layer.window.is_some() {
        return Err(inputs(
            "a layer with a sliding window in a group with R-SWA, which is a window of its own",
        ));
    }
    cache.check(&shape, bytes.len())?;
    check_heads(&shape, layer)?;
    let rows = batch.plan.rows();
    let (tokens, dtype) = (out.shape().first().copied().unwrap_or(0), q.dtype());
    check_rows("query", q.shape(), shape.num_heads, shape.head_size, rows)?;
    check_rows("output", out.shape(), shape.num_heads, shape.head_size_v, rows)?;
    let (found, expected) = (out.dtype(), quant.map_or(dtype, |q| q.dtype()));
    if found != expected {
        return Err(TensorError::WrongDType { what: "output", found, supported: expected.name() }.into());
    }
    let scales_of_row = quant.map_or(0, |q| shape.num_heads * q.scales_of(shape.head_size_v));
    if let Some(q) = quant.filter(|q| !q.fits(shape.head_size_v)) {
        return Err(inputs(format!("output as {q:?} with value heads of {}", shape.head_size_v)));
    }
    if scales.len() < tokens * scales_of_row {
        return Err(inputs(format!("room for {} scales of {tokens} rows of {scales_of_row}", scales.len())));
    }
    let merge = matches!(lse, Lse::Merge(_));
    let lse = match lse {
        Lse::None => None,
        Lse::Write(l) | Lse::Merge(l) => Some(l),
    };
    if lse.as_ref().is_some_and(|l| l.len() < rows * shape.num_heads) {
        return Err(inputs("too little room for the log-sum-exp"));
    }
    if merge && (quant.is_some() || dtype != DType::F32 || layer.sinks.is_some() || layer.v_scale != 1.0) {
        return Err(inputs("results merge in float32, without sinks and without a scale on the values"));
    }
    if !isa.is_available() {
        return Err(inputs(format!("kernels for {isa} can't run on this machine")));
    }
    let run = entry::kernel(isa, cache.dtype, &shape).ok_or(TensorError::WrongDType {
        what: "KV cache",
        found: cache.dtype,
        supported: "float32, float16, bfloat16, float8_e4m3fn, float8_e5m2",
    })?;
    if rows < tokens && !merge {
        out.reborrow().rows(rows..tokens)?.zero_host()?;
        scales[rows * scales_of_row..tokens * scales_of_row].fill(0.0);
    }
    let q_rows = read_rows(q)?;
    let out_rows = write_rows(out, quant.is_some())?;
    let mut inner = workspace.inner.lock().map_err(|_| inputs("an earlier call of this group panicked"))?;
    let Inner { workers, slots, arrivals } = &mut *inner;
    let workers = &*workers;
    if workers.len() < pool.threads() {
        return Err(inputs(format!(
            "a workspace for {} threads in a pool of {}",
            workers.len(),
            pool.threads()
        )));
    }
    let head_bytes = cache.head_bytes(&shape);
    let table = batch.table.host().unwrap_or(&[]);
    let bad_block = BadBlock::default();
    let job = Job {
        plan: &batch.plan,
        shape,
        layout: shape.scratch(),
        q: q_rows,
        out: out_rows,
        dtype,
        quant: quant.map(|q| (q, scales.as_mut_ptr())),
        lse: lse.map_or(std::ptr::null_mut(), <[f32]>::as_mut_ptr),
        merge,
        cache: CacheMap {
            base: bytes[cache.offset..].as_ptr(),
            block_stride: cache.block_stride,
            block_size: cache.block_size,
            num_blocks: cache.num_blocks,
            head_bytes,
            values: match shape.form {
                Form::KeysAndValues => cache.block_size * shape.head_size * cache.dtype.size(),
                Form::Latent => 0,
            },
        },
        block_table: table,
        block_table_stride: batch.stride,
        bad_block: &bad_block,
        scale: layer.scale * layer.k_scale,
        v_scale: layer.v_scale,
        window: batch.plan.rswa_window().or(layer.window),
        soft_cap: layer.soft_cap,
        alibi_slopes: layer.alibi_slopes,
        sinks: layer.sinks,
        slots: slots.as_bytes_mut().as_mut_ptr().cast(),
        arrivals,
    };
    pool.run(batch.plan.num_items(), &|task, worker| {
        let scratch = workers.get(worker).and_then(|w| w.lock().ok());
        if let (Some(work), Some(mut scratch)) = (job.work(task), scratch) {
            // SAFETY: the machine has `isa`. The scratch has the layout's floats and is locked. `q`,
            // `out`, `lse` and the cache have what the plan and the shape reach, checked above; every
            // block number is held against the cache before it is used (`place`). A plan's items hold disjoint
            // (rows, heads, chunks), each is run once, and the workspace is locked for this call.
            unsafe { run(&job, work, scratch.as_bytes_mut().as_mut_ptr().cast()) }
        }
    });
    match bad_block.get() {
        None => Ok(()),
        Some((request, block)) => Err(inputs(format!(
            "block {block} in the part of request {request}'s block table that is read; the cache has {}",
            cache.num_blocks
        ))),
    }
}

/// The activations' types, and what lies behind a tensor of one of them.
macro_rules! by_dtype {
    ($tensor:expr, $what:literal, $t:ident => $e:expr) => {
        match $tensor.dtype() {
            DType::F32 => {
                type $t = f32;
                $e
            }
            DType::F16 => {
                type $t = half::f16;
                $e
            }
            DType::BF16 => {
                type $t = half::bf16;
                $e
            }
            found => {
                let supported = "float32, float16, bfloat16";
                return Err(TensorError::WrongDType { what: $what, found, supported }.into());
            }
        }
    };
}

fn read_rows(x: TensorRef<'_>) -> Result<Rows<*const u8>> {
    let (size, strides) = (x.dtype().size(), contiguous(x.shape(), x.strides())?);
    let base = by_dtype!(x, "attention", T => x.into_host::<T>()?.as_ptr().cast());
    Ok(Rows { base, token_stride: strides.0 * size, head_stride: strides.1 * size })
}

fn write_rows(x: TensorMut<'_>, codes: bool) -> Result<Rows<*mut u8>> {
    let (size, strides) = (x.dtype().size(), contiguous(x.shape(), x.strides())?);
    // Tokens outermost, or heads outermost.
    let apart = |outer: usize, step: usize, inner: usize, inner_step: usize, width: usize| {
        (outer <= 1 || step >= inner.saturating_sub(1) * inner_step + width)
            && (inner <= 1 || inner_step >= width)
    };
    let (tokens, heads, width) = (x.shape()[0], x.shape()[1], x.shape()[2]);
    if !apart(tokens, strides.0, heads, strides.1, width)
        && !apart(heads, strides.1, tokens, strides.0, width)
    {
        return Err(inputs("output rows overlap"));
    }
    let base = match codes {
        true => x.into_host_bytes()?.as_mut_ptr(),
        false => by_dtype!(x, "attention", T => x.into_host::<T>()?.as_mut_ptr().cast()),
    };
    Ok(Rows { base, token_stride: strides.0 * size, head_stride: strides.1 * size })
}

/// Token and head strides of `[tokens, heads, size]` with contiguous heads.
fn contiguous(shape: &[usize], strides: &[usize]) -> Result<(usize, usize)> {
    match (shape, strides) {
        (&[_, heads, size], &[token, head, step])
            if (step == 1 || size == 1) && (head >= size || heads == 1) =>
        {
            Ok((token, head))
        }
        _ => {
            Err(inputs(format!("rows of shape {shape:?} with strides {strides:?}; heads must be contiguous")))
        }
    }
}

fn check_heads(shape: &Shape, layer: &LayerNumbers<'_>) -> Result<()> {
    for (what, per_head) in [("ALiBi slopes", layer.alibi_slopes), ("sinks", layer.sinks)] {
        if let Some(x) = per_head
            && x.len() != shape.num_heads
        {
            return Err(inputs(format!("{} {what} for {} heads", x.len(), shape.num_heads)));
        }
    }
    Ok(())
}

/// At least `rows` rows of `[heads, size]`.
fn check_rows(what: &str, found: &[usize], heads: usize, size: usize, rows: usize) -> Result<()> {
    match *found {
        [n, h, s] if n >= rows && h == heads && s == size => Ok(()),
        _ => Err(TensorError::WrongShape {
            what: format!("attention {what}"),
            found: found.to_vec(),
            expected: format!("[at least {rows}, {heads}, {size}]"),
        }
        .into()),
    }
}

#[cfg(test)]
mod tests;
