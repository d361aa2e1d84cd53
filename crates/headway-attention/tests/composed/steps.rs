//! Random steps through a composition: every row against what its part alone would have computed of it.

use super::{
    marked::{self, WIDTH, registry},
    support::{HostExec, inputs},
};
use headway_attention::{
    step::micro_batch::{MicroBatchSlice, SliceBuffers, slice_common, slice_inputs},
    *,
};
use headway_tensor::{DType, Dual, HostBuf, TensorMut, TensorRef, View};
use proptest::prelude::*;
use std::sync::Arc;

/// Requests as new tokens and tokens, decodes first; then rows of padding, and tokens of padding.
#[derive(Clone, Debug)]
struct Batch {
    reqs: Vec<(i32, i32)>,
    padding_reqs: usize,
    padding_tokens: usize,
    causal: Option<Vec<u8>>,
}

impl Batch {
    fn live(&self) -> usize {
        self.reqs.iter().map(|r| r.0 as usize).sum()
    }

    fn tokens(&self) -> usize {
        self.live() + self.padding_tokens
    }

    fn inputs(&self) -> StepInputs {
        let mut reqs = self.reqs.clone();
        reqs.resize(reqs.len() + self.padding_reqs, (0, 0));
        let (new, all): (Vec<i32>, Vec<i32>) = reqs.iter().copied().unzip();
        let mut i = inputs(&new, &all);
        i.num_actual_tokens = self.tokens();
        let mut positions: Vec<i32> = self.reqs.iter().flat_map(|&(n, all)| all - n..all).collect();
        positions.resize(self.tokens(), 0);
        i.positions = Some(View::from_vec(positions));
        if let Some(flags) = &self.causal {
            let mut flags = flags[..self.reqs.len()].to_vec();
            flags.resize(reqs.len(), 1);
            i.causal = Causal::PerRequest(View::from_vec(flags));
        }
        i
    }

    /// Request r has block `first + r` first; each token has a slot of its own.
    fn common(&self, inputs: &Arc<StepInputs>, first: i32) -> CommonAttentionMetadata {
        let table = (0..inputs.num_reqs as i32).flat_map(|r| [first + r, 0]).collect();
        let mut slots: Vec<i64> = (0..self.live() as i64).map(|t| 100 + t).collect();
        slots.resize(self.tokens(), -1);
        CommonAttentionMetadata::new(inputs.clone(), Dual::from_vec(table), 2, View::from_vec(slots)).unwrap()
    }

    /// The first requests that are decodes.
    fn decodes(&self, threshold: i32) -> usize {
        self.reqs.iter().take_while(|r| r.0 <= threshold).count()
    }

    /// What each row must say. A batch without other rows is the decodes' part, padding included.
    fn answer(&self, threshold: i32, first: i32, marks: [f32; 2], q: &[f32]) -> Vec<f32> {
        let decodes = self.decodes(threshold);
        let mut out = vec![];
        for (r, &(n, all)) in self.reqs.iter().enumerate() {
            let causal = self.causal.as_ref().is_none_or(|c| c[r] != 0);
            let mark = marks[usize::from(r >= decodes)] + if causal { 0.0 } else { 0.5 };
            for p in all - n..all {
                let t = out.len() / WIDTH;
                let of = [mark, (1000 * (first + r as i32) + all) as f32, (1000 * p + 100 + t as i32) as f32];
                out.extend(of.into_iter().chain([q[t * WIDTH]]));
            }
        }
        out.resize(self.tokens() * WIDTH, 0.0);
        out
    }
}

fn batch() -> impl Strategy<Value = Batch> {
    let decode = (1i32..5, 0i32..40).prop_map(|(n, before)| (n, n + before));
    let any = (1i32..9, 0i32..40).prop_map(|(n, before)| (n, n + before));
    let flags = proptest::option::of(proptest::collection::vec(0u8..2, 12));
    (
        proptest::collection::vec(decode, 0..6),
        proptest::collection::vec(any, 0..6),
        0usize..3,
        0usize..4,
        flags,
    )
        .prop_map(|(mut reqs, others, padding_reqs, padding_tokens, causal)| {
            reqs.sort_unstable();
            reqs.extend(others);
            Batch { reqs, padding_reqs, padding_tokens, causal }
        })
        .prop_filter("a step has a request", |b| !b.reqs.is_empty())
}

struct World {
    groups: Vec<AttentionGroup>,
    layer: Box<dyn DynAttention>,
    cache: KvBuf,
    step: StepMetadata,
}

fn handle(shared: bool) -> KvHandle {
    KvHandle {
        buf: 0,
        offset: 0,
        block_stride: 16,
        page_bytes: 16,
        num_blocks: 32,
        block_size: 16,
        dtype: DType::F32,
        layout: KvCacheLayout::default(),
        shared,
    }
}

impl World {
    /// A composition with its two groups, of which the second shares the first's metadata.
    fn new(name: &str, drafts: usize) -> Result<Self> {
        let backend = registry().get(name)?;
        let table = serde_json::json!({ "MARK_2": { "offset": 10 } });
        let config = backend.configure(table.as_object().unwrap())?;
        let info = GroupInfo {
            max_num_reqs: 16,
            max_num_tokens: 128,
            num_speculative_tokens: drafts,
            ..GroupInfo::new(marked::spec(), 1)
        };
        let group = |at: usize, shares| {
            AttentionGroup::new(&*backend, &HostExec, at, info.clone(), &config, 1, shares)
        };
        let args = AttentionArgs {
            layer: AttnLayer(0),
            num_heads: 1,
            num_kv_heads: 1,
            head_size: WIDTH,
            head_size_v: WIDTH,
            scale: 1.0,
            sliding_window: None,
            logit_soft_cap: None,
            alibi_slopes: None,
            sinks: None,
            dtype: DType::F32,
            kv_cache_dtype: DType::F32,
            k_scale: 1.0,
            v_scale: 1.0,
        };
        let LayerKernel::Standard(layer) = backend.layer(&LayerArgs::Standard(args), &config)? else {
            panic!("a composition makes standard layers")
        };
        assert!(backend.updates_block_table());
        Ok(Self {
            groups: vec![group(0, None)?, group(1, Some(0))?],
            layer,
            cache: KvBuf::Host(HostBuf::zeroed(512)?),
            step: StepMetadata::new(vec![0u16, 1].into()),
        })
    }

    /// What a layer of a group puts out, and how often each slot was written.
    fn run(&mut self, entry: &StepEntry, q: &[f32], shared: bool) -> Result<(Vec<f32>, Vec<u8>)> {
        let n = q.len() / WIDTH;
        let mut out = vec![-1f32; q.len()];
        let rows = TensorRef::from_host(q, &[n, 1, WIDTH])?;
        let none = rows.rows(0..0)?;
        let x = if shared { Qkv { q: rows, k: none, v: none } } else { Qkv { q: rows, k: rows, v: rows } };
        let to = TensorMut::from_host(&mut out, &[n, 1, WIDTH])?;
        self.cache = KvBuf::Host(HostBuf::zeroed(512)?);
        self.layer.run(&HostExec, &x, &mut handle(shared).on(&mut self.cache), entry, to)?;
        let KvBuf::Host(bytes) = &self.cache else { unreachable!() };
        Ok((out, bytes.as_bytes().to_vec()))
    }
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n * WIDTH).map(|i| i as f32 + 0.25).collect()
}

proptest! {
    #[test]
    fn each_row_is_its_parts(batch in batch(), drafts in 0usize..3, swapped in any::<bool>()) {
        let (name, marks) = if swapped { ("MARK_2+MARK_1", [12.0, 1.0]) } else { ("MARK_1+MARK_2", [1.0, 12.0]) };
        // MARK_2 takes decodes of one token, MARK_1 as many as there can be.
        let threshold = if swapped { 1 } else { 1 + drafts as i32 };
        let mut world = World::new(name, drafts).unwrap();
        let inputs = Arc::new(batch.inputs());
        let commons = [batch.common(&inputs, 3), batch.common(&inputs, 40)];
        let q = numbers(batch.tokens());
        build_step(&mut world.groups, &HostExec, &commons, 0, false, &mut world.step).unwrap();
        prop_assert_eq!((world.groups[0].builds(), world.groups[1].table_updates()), (1, 1));
        // The second group's entry is the first's with another table.
        for (at, first) in [3, 40].into_iter().enumerate() {
            let entry = world.step.layer(AttnLayer(at as u32)).unwrap().clone();
            prop_assert_eq!(entry.num_tokens(), batch.tokens());
            let want = batch.answer(threshold, first, marks, &q);
            let (out, written) = world.run(&entry, &q, false).unwrap();
            prop_assert_eq!(out, want.clone());
            let once: Vec<u8> = (0..512).map(|s| u8::from((100..100 + batch.live()).contains(&s))).collect();
            prop_assert_eq!(written, once);
            let (out, written) = world.run(&entry, &q, true).unwrap();
            prop_assert_eq!(out, want);
            prop_assert!(written.iter().all(|b| *b == 0));
            let decodes = batch.decodes(threshold);
            if decodes > 0 && decodes < batch.reqs.len() {
                let decode_tokens = batch.reqs[..decodes].iter().map(|r| r.0 as usize).sum();
                prop_assert_eq!(entry.split(), DecodeSplit { decodes, decode_tokens });
            }
        }
    }

    /// A micro-batch is a step of its own, cut in two like any other.
    #[test]
    fn micro_batches_are_cut_too(batch in batch(), at in 0usize..128) {
        let mut world = World::new("MARK_1+MARK_2", 0).unwrap();
        let inputs = Arc::new(batch.inputs());
        let whole = batch.common(&inputs, 3);
        // Between two requests: what a cut inside one does to its length is the cut's affair.
        let r = at % batch.reqs.len();
        let tokens: usize = batch.reqs[..r].iter().map(|r| r.0 as usize).sum();
        let slice = MicroBatchSlice { requests: r..inputs.num_reqs, tokens: tokens..batch.tokens() };
        let mut buffers = SliceBuffers::new(&HostExec, 16).unwrap();
        let part = Arc::new(slice_inputs(&inputs, &slice, &mut buffers, &HostExec).unwrap());
        let common = slice_common(&whole, &slice, part).unwrap();
        let q = numbers(batch.tokens());
        build_step(&mut world.groups[..1], &HostExec, &[common], 0, false, &mut world.step).unwrap();
        let entry = world.step.layer(AttnLayer(0)).unwrap().clone();
        let (out, _) = world.run(&entry, &q[tokens * WIDTH..], false).unwrap();
        let rest = Batch {
            reqs: batch.reqs[r..].to_vec(),
            causal: batch.causal.as_ref().map(|c| c[r..].to_vec()),
            ..batch.clone()
        };
        let mut want = rest.answer(1, 3 + r as i32, [1.0, 12.0], &q[tokens * WIDTH..]);
        for row in want.chunks_exact_mut(WIDTH).take(rest.live()) {
            row[2] += tokens as f32;
        }
        prop_assert_eq!(out, want);
    }
}

#[test]
fn the_profile_run_makes_both_parts_ready_and_leaves_zeros() -> Result<()> {
    let mut world = World::new("MARK_1+MARK_2", 0)?;
    let (out, written) = world.run(&StepEntry::profile_run(3), &numbers(3), false)?;
    assert!(out.iter().all(|x| *x == 0.0) && written.iter().all(|b| *b == 0));
    Ok(())
}

#[test]
fn buffers_are_recycled_from_step_to_step() -> Result<()> {
    let batch = Batch { reqs: vec![(1, 9), (4, 4)], padding_reqs: 1, padding_tokens: 2, causal: None };
    let mut world = World::new("MARK_1+MARK_2", 0)?;
    let inputs = Arc::new(batch.inputs());
    let mut frozen = |first, clear: bool| -> Result<u64> {
        let commons = [batch.common(&inputs, first), batch.common(&inputs, first)];
        if clear {
            world.step.clear();
        }
        let kept = world.step.clone();
        build_step(&mut world.groups, &HostExec, &commons, 0, false, &mut world.step)?;
        drop(kept);
        Ok(world.step.entries()[0].frozen())
    };
    let first = frozen(3, true)?;
    assert_eq!([frozen(4, true)?, frozen(5, true)?], [first; 2]);
    // What an earlier step still reads is not written over.
    assert_ne!(frozen(6, false)?, first);
    Ok(())
}

#[test]
fn another_backends_entry_is_refused() -> Result<()> {
    let mut world = World::new("MARK_1+MARK_2", 0)?;
    let other = registry().get("MARK_1")?;
    let config = other.parse_config(None)?;
    let group = GroupInfo::new(marked::spec(), 1);
    let mut builder = other.builder(&HostExec, &group, &other.plan(&group, &config)?, &config)?;
    let batch = Batch { reqs: vec![(1, 9)], padding_reqs: 0, padding_tokens: 0, causal: None };
    let common = batch.common(&Arc::new(batch.inputs()), 3);
    let entry = builder.build(&HostExec, &common, false)?;
    let e = world.run(&entry, &numbers(1), false).unwrap_err().to_string();
    assert!(e.contains("another backend's group"), "{e}");
    Ok(())
}
