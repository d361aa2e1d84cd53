//! A pretend GPU: memory that the host can't read, capture that records addresses, graphs that hold
//! what was captured.
#![allow(dead_code, reason = "each test file uses its part")]

use headway_attention::*;
use headway_tensor::{Device, DeviceMem, Exec, Persistent, TensorMut, View};
use std::{
    any::Any,
    cell::{Cell, RefCell},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

static NEXT: AtomicU64 = AtomicU64::new(0x1000);

#[derive(Debug)]
struct SimMem {
    addr: u64,
    bytes: Mutex<Vec<u8>>,
    live: Arc<AtomicU64>,
}

impl Drop for SimMem {
    fn drop(&mut self) {
        self.live.fetch_sub(1, Relaxed);
    }
}

impl DeviceMem for SimMem {
    fn device(&self) -> Device {
        Device { kind: "sim", index: 0 }
    }
    fn addr(&self) -> u64 {
        self.addr
    }
    fn bytes(&self) -> usize {
        self.bytes.lock().unwrap().len()
    }
}

/// The pretend GPU's stream.
#[derive(Default)]
pub struct SimExec {
    pub capturing: Cell<bool>,
    pub recorded: RefCell<Vec<u64>>,
    pub live: Arc<AtomicU64>,
}

impl Exec for SimExec {
    fn device(&self) -> Device {
        Device { kind: "sim", index: 0 }
    }
    fn alloc(&self, n: usize) -> headway_tensor::Result<Option<Arc<dyn DeviceMem>>> {
        assert!(!self.capturing.get(), "no allocation during capture");
        self.live.fetch_add(1, Relaxed);
        let addr = NEXT.fetch_add(n.max(256) as u64, Relaxed);
        Ok(Some(Arc::new(SimMem { addr, bytes: Mutex::new(vec![0; n]), live: self.live.clone() })))
    }
    fn upload(&self, to: &Arc<dyn DeviceMem>, offset: usize, from: &[u8]) {
        let mem = (&**to as &dyn Any).downcast_ref::<SimMem>().unwrap();
        mem.bytes.lock().unwrap()[offset..offset + from.len()].copy_from_slice(from);
    }
    fn capturing(&self) -> bool {
        self.capturing.get()
    }
}

/// A captured graph: the addresses it recorded, the fingerprints, and the metadata that keep the buffers.
pub struct Graph {
    pub keep: StepMetadata,
    pub addresses: Vec<u64>,
    pub frozen: Vec<u64>,
}

impl Graph {
    /// Whether a step may be replayed: everything that capture froze is as it was.
    pub fn replays(&self, now: &StepMetadata) -> bool {
        self.frozen.iter().eq(now.entries().iter().map(StepEntry::frozen).collect::<Vec<_>>().iter())
    }
}

pub struct SimMetadata {
    pub lens: View<i32>,
    pub table: View<i32>,
    pub splits: u32,
}

pub struct SimBuilder {
    lens: Persistent<i32>,
    max_num_reqs: usize,
}

impl MetadataBuilder for SimBuilder {
    type Exec = SimExec;
    type Config = ();
    type Metadata = SimMetadata;
    fn new(cx: &SimExec, group: &GroupInfo, _: &BuilderPlan, _: &()) -> Result<Self> {
        Ok(Self { lens: Persistent::new(cx, group.max_num_reqs)?, max_num_reqs: group.max_num_reqs })
    }
    fn build(&mut self, cx: &SimExec, common: &CommonAttentionMetadata) -> Result<SimMetadata> {
        let bound = &common.inputs.seq_lens_upper_bound;
        let lens = self.lens.write(cx, self.max_num_reqs, |o| {
            o.fill(0);
            o[..bound.len()].copy_from_slice(bound);
        });
        let splits = 1 + common.inputs.max_seq_len as u32 / 64;
        Ok(SimMetadata { lens, table: common.block_table.dev().clone(), splits })
    }
    fn build_for_capture(&mut self, cx: &SimExec, common: &CommonAttentionMetadata) -> Result<SimMetadata> {
        if common.inputs.max_query_len > 1 {
            return Err(AttentionError::Graph("SIM_ATTN captures decodes only".into()));
        }
        self.build(cx, common)
    }
    fn frozen(m: &SimMetadata) -> u64 {
        m.lens.addr().wrapping_mul(31) ^ m.table.addr() ^ (u64::from(m.splits) << 48)
    }
}

pub struct SimLayer;

impl LayerImpl for SimLayer {
    type Exec = SimExec;
    type Config = ();
    type Metadata = SimMetadata;
}

impl AttentionImpl for SimLayer {
    fn new(_: &AttentionArgs<'_>, _: &()) -> Result<Self> {
        Ok(Self)
    }
    fn update_kv_cache(&self, _: &SimExec, _: &Qkv<'_>, _: &mut KvMut<'_>, _: &View<i64>) -> Result<()> {
        Ok(())
    }
    fn forward(
        &self,
        cx: &SimExec,
        _: &Qkv<'_>,
        _: &mut KvMut<'_>,
        m: &SimMetadata,
        _: TensorMut<'_>,
    ) -> Result<()> {
        if cx.capturing() {
            cx.recorded.borrow_mut().extend([m.lens.addr(), m.table.addr()]);
        }
        Ok(())
    }
}

pub enum SimAttn {}

impl AttentionBackend for SimAttn {
    const CONTRACT: u32 = 1;
    type Exec = SimExec;
    type Kind = Standard;
    type Config = ();
    type Builder = SimBuilder;
    type Impl = SimLayer;
    fn rules() -> RuleBook {
        RuleBook {
            name: "SIM_ATTN".into(),
            platform: "sim".into(),
            graph_support: GraphSupport::UniformSingleTokenDecode,
            ..RuleBook::default()
        }
    }
}
