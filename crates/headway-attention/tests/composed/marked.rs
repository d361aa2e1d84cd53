//! Host backends whose output says who computed a row and from what: mark, first block, length, and where the key went.

use super::support::HostExec;
use headway_attention::{
    process::rules::{AttnType, KindTag},
    *,
};
use headway_tensor::{DType, TensorMut, TensorRef, View};

/// Elements of a row of the output.
pub const WIDTH: usize = 4;

/// One head of four elements, one key a token of one byte each.
pub fn spec() -> KvCacheSpec {
    KvCacheSpec::Full(AttentionSpec::new(16, 1, WIDTH, DType::F32))
}

pub fn need() -> LayerNeed {
    LayerNeed { head_size: 64, head_size_v: 64, dtype: DType::F32, ..LayerNeed::default() }
}

#[derive(serde::Deserialize, Default, Debug, Clone)]
#[serde(default, deny_unknown_fields)]
pub struct MarkedConfig {
    pub offset: i32,
}

/// What it was built from.
pub struct MarkedMeta {
    starts: Vec<i32>,
    seq_lens: Vec<i32>,
    causal: Vec<bool>,
    blocks: Vec<i32>,
    slots: Vec<i64>,
    positions: Vec<i32>,
    padded: usize,
    at: u64,
}

pub struct MarkedBuilder;

fn meta(common: &CommonAttentionMetadata) -> Result<MarkedMeta> {
    let x = &common.inputs;
    let starts = x.query_start_loc.host().to_vec();
    let longest = starts.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
    if starts.len() != x.num_reqs + 1 || starts[0] != 0 || longest as usize > x.max_query_len {
        return Err(AttentionError::Inputs(format!("bounds {starts:?} of {} requests", x.num_reqs)));
    }
    if x.seq_lens_upper_bound.iter().any(|&l| l as usize > x.max_seq_len) {
        return Err(AttentionError::Inputs(format!("a length above {}", x.max_seq_len)));
    }
    Ok(MarkedMeta {
        seq_lens: x.seq_lens.host().unwrap().to_vec(),
        causal: (0..x.num_reqs).map(|r| common.causal().of(r)).collect(),
        blocks: (0..x.num_reqs).map(|r| common.blocks_of(r)[0]).collect(),
        slots: common.slot_mapping.host().unwrap().to_vec(),
        positions: x.positions.as_ref().unwrap().host().unwrap().to_vec(),
        padded: x.num_actual_tokens,
        at: x.query_start_loc.dev().addr(),
        starts,
    })
}

impl MetadataBuilder for MarkedBuilder {
    type Exec = HostExec;
    type Config = MarkedConfig;
    type Metadata = MarkedMeta;
    const UPDATES_BLOCK_TABLE: bool = true;

    fn plan(_: &GroupInfo, rules: &RuleBook, _: &MarkedConfig) -> Result<BuilderPlan> {
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: rules.reorder_batch_threshold,
            persistent_bytes: 100,
            workspace_bytes: rules.name.len() as u64,
        })
    }
    fn new(_: &HostExec, _: &GroupInfo, _: &BuilderPlan, _: &MarkedConfig) -> Result<Self> {
        Ok(Self)
    }
    fn build(&mut self, _: &HostExec, common: &CommonAttentionMetadata) -> Result<MarkedMeta> {
        meta(common)
    }
    fn update_block_table(
        &mut self,
        _: &HostExec,
        first: &MarkedMeta,
        common: &CommonAttentionMetadata,
    ) -> Result<MarkedMeta> {
        let fresh = meta(common)?;
        if (&first.starts, &first.seq_lens, first.padded) != (&fresh.starts, &fresh.seq_lens, fresh.padded) {
            return Err(AttentionError::Inputs("another batch than the first group's".into()));
        }
        Ok(fresh)
    }
    /// Where the requests' bounds lie.
    fn frozen(m: &MarkedMeta) -> u64 {
        m.at
    }
}

/// Adds one to the byte of each slot that it writes.
pub struct MarkedLayer<const MARK: u8>(f32);

impl<const MARK: u8> LayerImpl for MarkedLayer<MARK> {
    type Exec = HostExec;
    type Config = MarkedConfig;
    type Metadata = MarkedMeta;
}

impl<const MARK: u8> AttentionImpl for MarkedLayer<MARK> {
    fn new(_: &AttentionArgs<'_>, config: &MarkedConfig) -> Result<Self> {
        Ok(Self(f32::from(MARK) + config.offset as f32))
    }
    fn update_kv_cache(
        &self,
        _: &HostExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        slots: &View<i64>,
    ) -> Result<()> {
        assert!(!kv.shared && x.k.shape()[0] <= slots.len());
        let bytes = kv.host_bytes()?;
        for &slot in slots.host().unwrap().iter().filter(|s| **s >= 0) {
            bytes[slot as usize] += 1;
        }
        Ok(())
    }
    fn forward(
        &self,
        _: &HostExec,
        x: &Qkv<'_>,
        _: &mut KvMut<'_>,
        m: &MarkedMeta,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let q = x.q.into_host::<f32>()?;
        let out = out.into_host::<f32>()?;
        let live = *m.starts.last().unwrap() as usize;
        out[live * WIDTH..m.padded * WIDTH].fill(0.0);
        for (r, w) in m.starts.windows(2).enumerate() {
            for t in w[0] as usize..w[1] as usize {
                let of = [
                    self.0 + if m.causal[r] { 0.0 } else { 0.5 },
                    (1000 * m.blocks[r] + m.seq_lens[r]) as f32,
                    (1000 * m.positions[t]) as f32 + m.slots[t] as f32,
                    q[t * WIDTH],
                ];
                out[t * WIDTH..(t + 1) * WIDTH].copy_from_slice(&of);
            }
        }
        Ok(())
    }
}

/// A backend of the host; `MARK_1` takes any batch, `MARK_2` tells decodes from others.
pub enum Marked<const MARK: u8> {}

impl<const MARK: u8> AttentionBackend for Marked<MARK> {
    const CONTRACT: u32 = 1;
    type Exec = HostExec;
    type Kind = Standard;
    type Config = MarkedConfig;
    type Builder = MarkedBuilder;
    type Impl = MarkedLayer<MARK>;
    fn rules() -> RuleBook {
        let base = RuleBook {
            name: format!("MARK_{MARK}").into(),
            dtypes: vec![DType::F32],
            attn_types: vec![AttnType::Decoder, AttnType::EncoderOnly],
            supports_batch_invariance: true,
            graph_support: GraphSupport::Always,
            ..RuleBook::default()
        };
        match MARK {
            2 => RuleBook {
                supports_sliding_window: false,
                graph_support: GraphSupport::UniformBatch,
                reorder_batch_threshold: Some(1),
                ..base
            },
            // A cache of its own shape.
            3 => RuleBook { name: "PADDED".into(), ..base },
            4 => RuleBook { name: "ONE+TWO".into(), ..base },
            _ => base,
        }
    }
    fn customize_spec(mut spec: KvCacheSpec) -> KvCacheSpec {
        if let (3, Some(a)) = (MARK, spec.attention_mut()) {
            a.alignment = Some(512);
        }
        spec
    }
    fn combination(need: &LayerNeed) -> Option<Refusal> {
        (need.num_heads == 13).then(|| "13 heads not supported".into())
    }
}

/// A name that reads as two.
pub type Plus = Marked<4>;

/// Writes the cache where others read it.
pub struct WritesLayer;

impl LayerImpl for WritesLayer {
    type Exec = HostExec;
    type Config = MarkedConfig;
    type Metadata = MarkedMeta;
}

impl AttentionImpl for WritesLayer {
    const FORWARD_WRITES_KV_CACHE: bool = true;
    fn new(_: &AttentionArgs<'_>, _: &MarkedConfig) -> Result<Self> {
        Ok(Self)
    }
    fn update_kv_cache(&self, _: &HostExec, _: &Qkv<'_>, _: &mut KvMut<'_>, _: &View<i64>) -> Result<()> {
        unreachable!("forward writes")
    }
    fn forward(
        &self,
        _: &HostExec,
        _: &Qkv<'_>,
        _: &mut KvMut<'_>,
        _: &MarkedMeta,
        _: TensorMut<'_>,
    ) -> Result<()> {
        Ok(())
    }
}

pub enum WritesItself {}

impl AttentionBackend for WritesItself {
    const CONTRACT: u32 = 1;
    type Exec = HostExec;
    type Kind = Standard;
    type Config = MarkedConfig;
    type Builder = MarkedBuilder;
    type Impl = WritesLayer;
    fn rules() -> RuleBook {
        RuleBook {
            name: "WRITES_ITSELF".into(),
            forward_includes_kv_cache_update: true,
            ..Marked::<1>::rules()
        }
    }
}

/// Latent attention that computes nothing.
pub struct LatentLayer;

impl LayerImpl for LatentLayer {
    type Exec = HostExec;
    type Config = MarkedConfig;
    type Metadata = MarkedMeta;
}

impl MlaImpl for LatentLayer {
    fn new(_: &MlaArgs<'_>, _: &MarkedConfig) -> Result<Self> {
        Ok(Self)
    }
    fn update_kv_cache(
        &self,
        _: &HostExec,
        _: TensorRef<'_>,
        _: &mut KvMut<'_>,
        _: &View<i64>,
    ) -> Result<()> {
        Ok(())
    }
    fn forward_mqa(
        &self,
        _: &HostExec,
        _: TensorRef<'_>,
        _: &mut KvMut<'_>,
        _: &MarkedMeta,
        _: TensorMut<'_>,
    ) -> Result<()> {
        Ok(())
    }
    fn forward_mha(
        &self,
        _: &HostExec,
        _: TensorRef<'_>,
        _: TensorRef<'_>,
        _: &mut KvMut<'_>,
        _: &MarkedMeta,
        _: TensorMut<'_>,
    ) -> Result<()> {
        Ok(())
    }
}

pub enum Latent {}

impl AttentionBackend for Latent {
    const CONTRACT: u32 = 1;
    type Exec = HostExec;
    type Kind = Mla;
    type Config = MarkedConfig;
    type Builder = MarkedBuilder;
    type Impl = LatentLayer;
    fn rules() -> RuleBook {
        RuleBook { name: "LATENT".into(), kind: KindTag::Mla, ..RuleBook::default() }
    }
}

/// `MARK_1` and `MARK_2`, and what can't be composed with them.
pub fn registry() -> Registry {
    let mut r = Registry::default();
    r.register::<Marked<1>>().unwrap();
    r.register::<Marked<2>>().unwrap();
    r.register::<Marked<3>>().unwrap();
    r.register::<WritesItself>().unwrap();
    r.register::<Latent>().unwrap();
    r.register::<super::sim::SimAttn>().unwrap();
    r
}
