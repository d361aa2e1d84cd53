//! Lifetime: the model, per layer. Class 3 of 3, for multi-head latent attention (DeepSeek-V2,
//! arXiv 2405.04434): the cache holds one latent row a token, shared by all heads.

use super::{AttnLayer, ImplKind, LayerImpl};
use crate::{KindTag, KvMut, Result, StepEntry};
use headway_tensor::{DType, Exec, Linear, TensorMut, TensorRef, View};
use std::sync::Arc;

/// The kind of [`MlaImpl`].
pub enum Mla {}

impl ImplKind for Mla {
    const TAG: KindTag = KindTag::Mla;
    type Args<'a> = MlaArgs<'a>;
}

/// One MLA layer's numbers.
#[derive(Clone)]
pub struct MlaArgs<'a> {
    /// Which layer.
    pub layer: AttnLayer,
    /// Query heads on this rank.
    pub num_heads: usize,
    /// Width of the latent (`kv_lora_rank`).
    pub kv_lora_rank: usize,
    /// Elements of a query/key head without rotary position.
    pub qk_nope_head_dim: usize,
    /// Elements of a query/key head with rotary position.
    pub qk_rope_head_dim: usize,
    /// Elements of a value head.
    pub v_head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Expands the latent into keys and values: `[num_heads x (qk_nope + v), kv_lora_rank]`. It may
    /// be quantised; the impl's constructor absorbs it for decode, once, and keeps it for prefill.
    pub kv_b_proj: &'a Arc<dyn Linear>,
    /// Type of the activations.
    pub dtype: DType,
    /// Element type of the latent cache.
    pub kv_cache_dtype: DType,
    /// Factor that turns stored latents into latents (fp8 caches; 1 otherwise).
    pub kv_scale: f32,
}

/// One layer of latent attention. The first `decode_tokens` rows of a step go to `forward_mqa`
/// over the compressed cache, the rest to `forward_mha`, which expands keys and values. `Host` and
/// `Projection`, a linear layer from 4 to 8, are those of [`example`](crate::example).
///
/// ```
/// use headway_attention::*;
/// use headway_tensor::{TensorMut, TensorRef, View};
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::{Host, Projection};
/// use std::sync::Arc;
/// /// Marks which half a row went through.
/// struct Marks;
/// impl LayerImpl for Marks {
///     type Exec = Host;
///     type Config = ();
///     type Metadata = ();
/// }
/// impl MlaImpl for Marks {
///     fn new(args: &MlaArgs<'_>, _: &()) -> Result<Self> {
///         assert_eq!(args.kv_b_proj.in_features(), args.kv_lora_rank);
///         Ok(Self)
///     }
///     fn update_kv_cache(&self, _: &Host, _: TensorRef<'_>, _: &mut KvMut<'_>, _: &View<i64>) -> Result<()> {
///         Ok(())
///     }
///     fn forward_mqa(
///         &self, _: &Host, _: TensorRef<'_>, _: &mut KvMut<'_>, _: &(), out: TensorMut<'_>,
///     ) -> Result<()> {
///         out.into_host::<f32>()?.fill(1.0);
///         Ok(())
///     }
///     fn forward_mha(
///         &self, _: &Host, _: TensorRef<'_>, _: TensorRef<'_>, _: &mut KvMut<'_>, _: &(), out: TensorMut<'_>,
///     ) -> Result<()> {
///         out.into_host::<f32>()?.fill(2.0);
///         Ok(())
///     }
/// }
/// let kv_b_proj: Arc<dyn headway_tensor::Linear> = Arc::new(Projection);
/// let args = MlaArgs {
///     layer: AttnLayer(0), num_heads: 1, kv_lora_rank: 4, qk_nope_head_dim: 4, qk_rope_head_dim: 2,
///     v_head_dim: 4, scale: 1.0, kv_b_proj: &kv_b_proj,
///     dtype: headway_tensor::DType::F32, kv_cache_dtype: headway_tensor::DType::F32, kv_scale: 1.0,
/// };
/// let _layer = Marks::new(&args, &())?;
/// # Ok::<(), AttentionError>(())
/// ```
pub trait MlaImpl: LayerImpl {
    /// Takes a layer's numbers, and absorbs `kv_b_proj`.
    ///
    /// # Errors
    /// What the rule book should have refused.
    fn new(args: &MlaArgs<'_>, config: &Self::Config) -> Result<Self>;

    /// Writes latent rows `[num_tokens, kv_lora_rank + qk_rope_head_dim]` by slot; −1 is skipped.
    ///
    /// # Errors
    /// Shapes, dtypes, a slot outside the cache.
    fn update_kv_cache(
        &self,
        cx: &Self::Exec,
        latent: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        slot_mapping: &View<i64>,
    ) -> Result<()>;

    /// Decode rows: all heads attend to the one latent head.
    ///
    /// # Errors
    /// Shapes, dtypes.
    fn forward_mqa(
        &self,
        cx: &Self::Exec,
        q: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        metadata: &Self::Metadata,
        out: TensorMut<'_>,
    ) -> Result<()>;

    /// Prefill rows: keys and values expanded from the latent, the cached context in chunks.
    ///
    /// # Errors
    /// Shapes, dtypes.
    fn forward_mha(
        &self,
        cx: &Self::Exec,
        q: TensorRef<'_>,
        latent: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        metadata: &Self::Metadata,
        out: TensorMut<'_>,
    ) -> Result<()>;
}

/// The object-safe twin of [`MlaImpl`].
///
/// `Latent` fills the rows of `forward_mqa` with 1 and those of `forward_mha` with 2; it and the step, one decode
/// token and a prefill of three, are in [`example`](crate::example).
///
/// ```
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::{Host, Latent, builder, cache, mla_args, projection, step};
/// use headway_attention::*;
/// use headway_tensor::{TensorMut, TensorRef};
/// let LayerKernel::Mla(layer) = <Latent as EraseAs<Mla>>::erase(&mla_args(&projection()), &())? else { unreachable!() };
/// let (handle, mut cache) = cache()?;
/// let (rows, mut out) = ([0f32; 4], [9f32; 4]);
/// let (q, latent) = (TensorRef::from_host(&rows, &[4, 1, 1])?, TensorRef::from_host(&rows, &[4, 1])?);
/// let entry = builder()?.build(&Host, &step()?, false)?;
/// let view = TensorMut::from_host(&mut out, &[4, 1])?;
/// layer.run(&Host, q, latent, &mut handle.on(&mut cache), &entry, view)?;
/// assert_eq!(out, [1.0, 2.0, 2.0, 2.0]);
/// # Ok::<(), AttentionError>(())
/// ```
pub trait DynMla: Send + Sync {
    /// Cache write (unless the layer shares another's cache), then the two halves of the step. q is `[num_tokens, num_heads, qk_head_dim]`,
    /// latent `[num_tokens, kv_lora_rank + qk_rope_head_dim]`, out `[num_tokens, num_heads x v_head_dim]`.
    ///
    /// # Errors
    /// The impl's own; an entry or exec of another backend.
    fn run(
        &self,
        cx: &dyn Exec,
        q: TensorRef<'_>,
        latent: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        entry: &StepEntry,
        out: TensorMut<'_>,
    ) -> Result<()>;
}
