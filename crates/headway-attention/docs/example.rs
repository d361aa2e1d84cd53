// The host without threads, and a backend whose layers copy the queries.
use headway_attention::*;
use headway_tensor::{
    DType, Device, DeviceMem, Dual, Exec, HostBuf, Linear, Tensor, TensorMut, TensorRef, View,
};
use std::sync::Arc;

pub struct Host;
impl Exec for Host {
    fn device(&self) -> Device {
        Device { kind: "cpu", index: 0 }
    }
    fn alloc(&self, _bytes: usize) -> headway_tensor::Result<Option<Arc<dyn DeviceMem>>> {
        Ok(None)
    }
    fn upload(&self, _to: &Arc<dyn DeviceMem>, _offset: usize, _from: &[u8]) {}
}

pub struct Builder;
pub struct Metadata {
    pub split: DecodeSplit,
}
impl MetadataBuilder for Builder {
    type Exec = Host;
    type Config = ();
    type Metadata = Metadata;
    fn new(_: &Host, _: &GroupInfo, _: &BuilderPlan, _: &()) -> Result<Self> {
        Ok(Self)
    }
    fn build(&mut self, _: &Host, common: &CommonAttentionMetadata) -> Result<Metadata> {
        Ok(Metadata { split: common.split(&step::batch::SplitOptions::default())?.into() })
    }
    fn split(metadata: &Metadata) -> DecodeSplit {
        metadata.split
    }
}

pub struct Layer;
impl LayerImpl for Layer {
    type Exec = Host;
    type Config = ();
    type Metadata = Metadata;
}
impl AttentionImpl for Layer {
    fn new(_: &AttentionArgs<'_>, _: &()) -> Result<Self> {
        Ok(Self)
    }
    fn update_kv_cache(&self, _: &Host, _: &Qkv<'_>, _: &mut KvMut<'_>, _: &View<i64>) -> Result<()> {
        Ok(())
    }
    fn forward(
        &self,
        _: &Host,
        x: &Qkv<'_>,
        _: &mut KvMut<'_>,
        _: &Metadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        out.into_host::<f32>()?.copy_from_slice(x.q.into_host::<f32>()?);
        Ok(())
    }
}

pub enum Copying {}
impl AttentionBackend for Copying {
    const CONTRACT: u32 = 1;
    type Exec = Host;
    type Kind = Standard;
    type Config = ();
    type Builder = Builder;
    type Impl = Layer;
    fn rules() -> RuleBook {
        RuleBook { name: "COPYING".into(), ..RuleBook::default() }
    }
}

// One attention layer: four query heads over two key/value heads of two elements.
pub fn args() -> AttentionArgs<'static> {
    AttentionArgs {
        layer: AttnLayer(0),
        num_heads: 4,
        num_kv_heads: 2,
        head_size: 2,
        head_size_v: 2,
        scale: 1.0,
        sliding_window: None,
        logit_soft_cap: None,
        alibi_slopes: None,
        sinks: None,
        dtype: DType::F32,
        kv_cache_dtype: DType::F32,
        k_scale: 1.0,
        v_scale: 1.0,
    }
}

// A cache of four blocks of 16 tokens, eight bytes a token.
pub fn cache() -> Result<(KvHandle, KvBuf)> {
    let handle = KvHandle {
        buf: 0,
        offset: 0,
        block_stride: 128,
        page_bytes: 128,
        num_blocks: 4,
        block_size: 16,
        dtype: DType::F32,
        layout: KvCacheLayout::LBNHC,
        shared: false,
    };
    Ok((handle, KvBuf::Host(HostBuf::zeroed(512)?)))
}

// A step of two requests: a decode at position 8, and a prefill of three tokens.
pub fn step() -> Result<CommonAttentionMetadata> {
    let (starts, lengths) = (Dual::from_vec(vec![0, 1, 4]), vec![9, 3]);
    let inputs = StepInputs::new(starts, View::from_vec(lengths.clone()), lengths)?;
    let slots = View::from_vec(vec![24, 32, 33, 34]);
    CommonAttentionMetadata::new(inputs.into(), Dual::from_vec(vec![1, 2]), 1, slots)
}

// `Copying`'s builder with its types erased.
pub fn builder() -> Result<Box<dyn DynBuilder>> {
    let mut registry = Registry::default();
    registry.register::<Copying>()?;
    let backend = registry.get("COPYING")?;
    let config = backend.parse_config(None)?;
    let group = GroupInfo::new(KvCacheSpec::Full(AttentionSpec::new(16, 2, 2, DType::F32)), 4);
    backend.builder(&Host, &group, &backend.plan(&group, &config)?, &config)
}

// Latent attention that marks which half of the step a row went through.
pub struct Latent;
impl LayerImpl for Latent {
    type Exec = Host;
    type Config = ();
    type Metadata = Metadata;
}
impl MlaImpl for Latent {
    fn new(_: &MlaArgs<'_>, _: &()) -> Result<Self> {
        Ok(Self)
    }
    fn update_kv_cache(&self, _: &Host, _: TensorRef<'_>, _: &mut KvMut<'_>, _: &View<i64>) -> Result<()> {
        Ok(())
    }
    fn forward_mqa(
        &self,
        _: &Host,
        _: TensorRef<'_>,
        _: &mut KvMut<'_>,
        _: &Metadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        out.into_host::<f32>()?.fill(1.0);
        Ok(())
    }
    fn forward_mha(
        &self,
        _: &Host,
        _: TensorRef<'_>,
        _: TensorRef<'_>,
        _: &mut KvMut<'_>,
        _: &Metadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        out.into_host::<f32>()?.fill(2.0);
        Ok(())
    }
}

pub struct Projection;
impl Linear for Projection {
    fn in_features(&self) -> usize {
        4
    }
    fn out_features(&self) -> usize {
        8
    }
    fn bytes(&self) -> usize {
        0
    }
}

pub fn projection() -> Arc<dyn Linear> {
    Arc::new(Projection)
}

pub fn mla_args(kv_b_proj: &Arc<dyn Linear>) -> MlaArgs<'_> {
    MlaArgs {
        layer: AttnLayer(0),
        num_heads: 1,
        kv_lora_rank: 4,
        qk_nope_head_dim: 4,
        qk_rope_head_dim: 2,
        v_head_dim: 4,
        scale: 1.0,
        kv_b_proj,
        dtype: DType::F32,
        kv_cache_dtype: DType::F32,
        kv_scale: 1.0,
    }
}

// A mixer that hands its input on.
pub struct Mixer;
impl LayerImpl for Mixer {
    type Exec = Host;
    type Config = ();
    type Metadata = Metadata;
}
impl StateSpaceImpl for Mixer {
    fn new(_: &StateSpaceArgs<'_>, _: &()) -> Result<Self> {
        Ok(Self)
    }
    fn forward(
        &self,
        _: &Host,
        x: TensorRef<'_>,
        _: &mut KvMut<'_>,
        _: &Metadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        out.into_host::<f32>()?.copy_from_slice(x.into_host::<f32>()?);
        Ok(())
    }
}

// A mixer of one head; one tensor serves for all of its weights.
pub fn state_space_args(weight: &Tensor) -> StateSpaceArgs<'_> {
    StateSpaceArgs {
        layer: AttnLayer(0),
        num_heads: 1,
        head_dim: 1,
        n_groups: 1,
        state_size: 1,
        conv_kernel: 1,
        chunk_size: 16,
        conv_weight: weight,
        conv_bias: None,
        a: weight,
        d: weight,
        dt_bias: weight,
        time_step_limit: (0.0, f32::INFINITY),
        dtype: DType::F32,
    }
}
