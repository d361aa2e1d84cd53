// What the examples in the documentation run on: the host without threads, and a backend whose layers
// copy the queries.
use headway_attention::*;
use headway_tensor::{Device, DeviceMem, Exec, TensorMut, View};
pub struct Host;
impl Exec for Host {
    fn device(&self) -> Device {
        Device { kind: "cpu", index: 0 }
    }
    fn alloc(&self, _bytes: usize) -> Option<std::sync::Arc<dyn DeviceMem>> {
        None
    }
    fn upload(&self, _to: &std::sync::Arc<dyn DeviceMem>, _offset: usize, _from: &[u8]) {}
}
pub struct Builder;
pub struct Metadata;
impl MetadataBuilder for Builder {
    type Exec = Host;
    type Config = ();
    type Metadata = Metadata;
    fn new(_: &Host, _: &GroupInfo, _: &BuilderPlan, _: &()) -> Result<Self> {
        Ok(Self)
    }
    fn build(&mut self, _: &Host, _: &CommonAttentionMetadata) -> Result<Metadata> {
        Ok(Metadata)
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
