//! Lifetime: the model, per layer. Class 3 of 3, for softmax attention over keys and values (MHA,
//! GQA, MQA; full, windowed, with sinks, ALiBi or a soft cap).

use super::{AttnLayer, ImplKind, LayerImpl};
use crate::{AttentionError, KindTag, KvMut, Result, StepEntry};
use headway_tensor::{DType, Exec, RowQuant, TensorMut, TensorRef, View};

/// The kind of [`AttentionImpl`].
pub enum Standard {}

impl ImplKind for Standard {
    const TAG: KindTag = KindTag::Standard;
    type Args<'a> = AttentionArgs<'a>;
}

/// One layer's numbers, constant for the model's life.
#[derive(Clone, Debug)]
pub struct AttentionArgs<'a> {
    /// Which layer.
    pub layer: AttnLayer,
    /// Query heads on this rank.
    pub num_heads: usize,
    /// Key/value heads on this rank; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a key (and query) head.
    pub head_size: usize,
    /// Elements of a value head; equal to `head_size` unless the rule book allows other values.
    pub head_size_v: usize,
    /// Factor on q·k before the soft cap and the softmax.
    pub scale: f32,
    /// Sliding window in tokens: position i sees j with `i - window < j <= i`.
    pub sliding_window: Option<usize>,
    /// `cap · tanh(score / cap)`.
    pub logit_soft_cap: Option<f32>,
    /// ALiBi slope of each query head `[num_heads]`: `slope · (j - i)` is added to the score.
    pub alibi_slopes: Option<&'a [f32]>,
    /// Sink logit of each query head `[num_heads]`: joins the softmax's denominator, has no value.
    pub sinks: Option<&'a View<f32>>,
    /// Type of q, k, v and out.
    pub dtype: DType,
    /// Element type of the cache.
    pub kv_cache_dtype: DType,
    /// Factor that turns stored keys into keys (fp8 caches; 1 otherwise).
    pub k_scale: f32,
    /// Factor that turns stored values into values (fp8 caches; 1 otherwise).
    pub v_scale: f32,
}

/// This step's new rows, one a token.
#[derive(Clone, Copy)]
pub struct Qkv<'a> {
    /// Queries `[num_tokens, num_heads, head_size]`.
    pub q: TensorRef<'a>,
    /// Keys `[num_tokens, num_kv_heads, head_size]`; no rows where the layer shares another layer's cache.
    pub k: TensorRef<'a>,
    /// Values `[num_tokens, num_kv_heads, head_size_v]`; as many rows as keys.
    pub v: TensorRef<'a>,
}

/// Where an output goes that the kernel quantises.
pub struct QuantisedOut<'a> {
    /// The rule.
    pub quant: RowQuant,
    /// `[num_tokens, num_heads, head_size_v]`, of the rule's type.
    pub codes: TensorMut<'a>,
    /// `[num_tokens, num_heads, scales of a head]`, float32: the scales that the rule makes; no elements where it makes
    /// none.
    pub scales: TensorMut<'a>,
}

/// One layer of softmax attention: writes new keys and values into the cache, and runs the kernel.
/// Stores nothing between steps. `Host` is the one of [`example`](crate::example).
///
/// ```
/// use headway_attention::*;
/// use headway_tensor::{TensorMut, View};
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::Host;
/// /// Attention to nothing: copies the queries.
/// struct Copy;
/// impl LayerImpl for Copy {
///     type Exec = Host;
///     type Config = ();
///     type Metadata = ();
/// }
/// impl AttentionImpl for Copy {
///     fn new(_: &AttentionArgs<'_>, _: &()) -> Result<Self> {
///         Ok(Self)
///     }
///     fn update_kv_cache(
///         &self, _: &Host, x: &Qkv<'_>, kv: &mut KvMut<'_>, slot_mapping: &View<i64>,
///     ) -> Result<()> {
///         let (keys, (page, stride, block)) = (x.k.into_host::<u8>()?, (kv.page_bytes, kv.block_stride, kv.block_size));
///         let (width, offset) = (page / block, kv.offset);
///         let cache = kv.host_bytes()?;
///         for (key, &slot) in keys.chunks_exact(width).zip(slot_mapping.host().unwrap_or(&[])) {
///             let Ok(slot) = usize::try_from(slot) else { continue }; // -1: nowhere
///             let at = offset + slot / block * stride + slot % block * width;
///             cache[at..at + width].copy_from_slice(key);
///         }
///         Ok(())
///     }
///     fn forward(
///         &self, _: &Host, x: &Qkv<'_>, _: &mut KvMut<'_>, _: &(), out: TensorMut<'_>,
///     ) -> Result<()> {
///         out.into_host::<u8>()?.copy_from_slice(x.q.into_host::<u8>()?);
///         Ok(())
///     }
/// }
///
/// let handle = KvHandle {
///     buf: 0, offset: 0, block_stride: 8, page_bytes: 8, num_blocks: 2, block_size: 4,
///     dtype: headway_tensor::DType::U8, layout: KvCacheLayout::LBNHC, shared: false,
/// };
/// let mut cache = KvBuf::Host(headway_tensor::HostBuf::zeroed(16)?);
/// let rows = [1u8, 2, 3, 4];
/// let x = headway_tensor::TensorRef::from_host(&rows, &[2, 1, 2])?;
/// Copy.update_kv_cache(&Host, &Qkv { q: x, k: x, v: x }, &mut handle.on(&mut cache), &View::from_vec(vec![5, -1]))?;
/// let KvBuf::Host(bytes) = &cache else { unreachable!() };
/// assert_eq!(bytes.as_bytes()[8..], [0, 0, 1, 2, 0, 0, 0, 0]);
/// # Ok::<(), AttentionError>(())
/// ```
pub trait AttentionImpl: LayerImpl {
    /// Whether `forward` writes the cache itself (the rule book says the same in
    /// `forward_includes_kv_cache_update`); then `update_kv_cache` is not called.
    const FORWARD_WRITES_KV_CACHE: bool = false;

    /// Takes a layer's numbers.
    ///
    /// # Errors
    /// What the rule book should have refused; a last defence.
    fn new(args: &AttentionArgs<'_>, config: &Self::Config) -> Result<Self>;

    /// Scatters k and v into the cache by slot: token t goes to `slot_mapping[t]`, −1 is skipped.
    /// Not called for a layer that shares another layer's cache, or has none.
    ///
    /// # Errors
    /// Shapes, dtypes, a slot outside the cache.
    fn update_kv_cache(
        &self,
        cx: &Self::Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        slot_mapping: &View<i64>,
    ) -> Result<()>;

    /// Attention of every row of q over its request's keys and values in the cache, into `out`
    /// `[num_tokens, num_heads, head_size_v]`. Rows past the last request are zero-filled.
    ///
    /// # Errors
    /// Shapes, dtypes, metadata that doesn't fit the cache.
    fn forward(
        &self,
        cx: &Self::Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &Self::Metadata,
        out: TensorMut<'_>,
    ) -> Result<()>;

    /// As [`AttentionImpl::forward`], with the output as codes: the same bits as quantising `forward`'s float32 output by
    /// the rule. For backends whose rule book lists the kind in `output_quants`; rows past the last request are
    /// zero-filled, their scales too.
    ///
    /// # Errors
    /// As `forward`; a rule that the backend doesn't write, which is every one unless it overrides this.
    fn forward_quantised(
        &self,
        cx: &Self::Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &Self::Metadata,
        out: QuantisedOut<'_>,
    ) -> Result<()> {
        let _ = (cx, x, kv, metadata);
        Err(AttentionError::Unsupported {
            backend: std::any::type_name::<Self>().into(),
            what: format!("output as {}", out.quant.kind()),
            remedy: "call forward and quantise its output".into(),
        })
    }
}

/// The object-safe twin of [`AttentionImpl`].
///
/// `Layer`, which copies the queries, and what it is called with are those of [`example`](crate::example).
///
/// ```
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::{Host, Layer, args, builder, cache, step};
/// use headway_attention::*;
/// use headway_tensor::{TensorMut, TensorRef};
/// let LayerKernel::Standard(layer) = <Layer as EraseAs<Standard>>::erase(&args(), &())? else { unreachable!() };
/// let (handle, mut cache) = cache()?;
/// let (rows, mut out) = ([1f32, 2.0, 3.0, 4.0], [9f32; 4]);
/// let x = TensorRef::from_host(&rows, &[4, 1, 1])?;
/// let x = Qkv { q: x, k: x, v: x };
/// let mut run = |entry: &StepEntry| -> Result<[f32; 4]> {
///     let view = TensorMut::from_host(&mut out, &[4, 1, 1])?;
///     layer.run(&Host, &x, &mut handle.on(&mut cache), entry, view)?;
///     Ok(out)
/// };
/// assert_eq!(run(&StepEntry::profile_run(4))?, [0.0; 4]);
/// assert_eq!(run(&builder()?.build(&Host, &step()?, false)?)?, rows);
/// # Ok::<(), AttentionError>(())
/// ```
pub trait DynAttention: Send + Sync {
    /// Cache write where the layer owns its cache, then the kernel. An entry without metadata (the
    /// profile run) fills `out` with zeros and touches no cache.
    ///
    /// # Errors
    /// The impl's own; an entry or exec of another backend.
    fn run(
        &self,
        cx: &dyn Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        entry: &StepEntry,
        out: TensorMut<'_>,
    ) -> Result<()>;

    /// As [`DynAttention::run`], with the output as codes ([`AttentionImpl::forward_quantised`]).
    ///
    /// # Errors
    /// As `run`; a rule that the backend doesn't write.
    fn run_quantised(
        &self,
        cx: &dyn Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        entry: &StepEntry,
        out: QuantisedOut<'_>,
    ) -> Result<()>;

    /// The cache write alone, by slot; −1 is skipped. For measurements, and for keys and values that
    /// come from elsewhere.
    ///
    /// # Errors
    /// The impl's own; a backend whose `forward` writes the cache.
    fn write_kv_cache(
        &self,
        cx: &dyn Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        slot_mapping: &View<i64>,
    ) -> Result<()>;
}
