//! `headway bench builder`: what a step's metadata costs, by requests and KV cache groups. The same for
//! any number of layers: builders run once per group and step.

use super::super::{CliError, measure::Sampler};
use headway_attention::{
    AttentionError, AttentionGroup, AttnLayer, CommonAttentionMetadata, DynBackend, GroupInfo, KvCacheSpec,
    Result, StepInputs, StepMetadata, build_step, group::kv::spec::AttentionSpec,
};
use headway_tensor::{DType, Dual, Ops, Persistent, View};
use serde::Serialize;
use std::sync::Arc;

/// Decoder layers, shared out over the groups.
const LAYERS: usize = 32;
/// Tokens in a block.
const BLOCK: usize = 16;
/// Tokens of a request with its new one.
const LENGTH: usize = 1000;
/// Of the groups after the first.
const WINDOW: usize = 512;

/// One measurement.
#[derive(Serialize, Debug)]
pub struct Line {
    bench: &'static str,
    peer: &'static str,
    backend: String,
    threads: usize,
    layers: usize,
    requests: usize,
    kv_cache_groups: usize,
    /// Metadata of all groups, from common metadata that is there.
    build_us: f64,
    build_min_us: f64,
    build_max_us: f64,
    /// The same, with the step's inputs written into persistent buffers first.
    with_inputs_us: f64,
    builds_per_step: usize,
    table_updates_per_step: usize,
}

struct Buffers {
    query_start_loc: Persistent<i32>,
    seq_lens: Persistent<i32>,
    tables: Vec<(Persistent<i32>, Persistent<i64>)>,
}

/// Measures a step of `requests` decodes with so many KV cache groups: the first of full attention, the
/// others windowed, as hybrid models have them.
///
/// # Errors
/// The backend's own.
pub fn run(
    backend: &Arc<dyn DynBackend>,
    ops: &dyn Ops,
    threads: usize,
    requests: usize,
    num_groups: usize,
) -> std::result::Result<Line, CliError> {
    let mut groups = groups(backend, ops, requests, num_groups)?;
    let width = LENGTH.div_ceil(BLOCK);
    let mut buffers = Buffers::new(ops, requests, width, num_groups).map_err(AttentionError::from)?;
    let mut step = StepMetadata::new((0..LAYERS).map(|l| (l % num_groups) as u16).collect());
    let mut commons = vec![];
    buffers.write(ops, requests, width, &mut commons)?;
    let build = Sampler::default().measure(None, |_| {
        step.clear();
        build_step(&mut groups, ops, &commons, 0, false, &mut step)
    })?;
    let counts = |groups: &[AttentionGroup]| {
        groups.iter().fold((0, 0), |(b, t), g| (b + g.builds(), t + g.table_updates()))
    };
    let before = counts(&groups);
    step.clear();
    build_step(&mut groups, ops, &commons, 0, false, &mut step)?;
    let after = counts(&groups);
    let all = Sampler::default().measure(None, |_| {
        step.clear();
        commons.clear();
        buffers.write(ops, requests, width, &mut commons)?;
        build_step(&mut groups, ops, &commons, 0, false, &mut step)
    })?;
    Ok(Line {
        bench: "builder",
        peer: "headway",
        backend: backend.rules().name.to_string(),
        threads,
        layers: LAYERS,
        requests,
        kv_cache_groups: num_groups,
        build_us: build.median * 1e6,
        build_min_us: build.min * 1e6,
        build_max_us: build.max * 1e6,
        with_inputs_us: all.median * 1e6,
        builds_per_step: after.0 - before.0,
        table_updates_per_step: after.1 - before.1,
    })
}

/// Heads as in an 8-billion-parameter Llama.
fn groups(
    backend: &Arc<dyn DynBackend>,
    ops: &dyn Ops,
    requests: usize,
    num_groups: usize,
) -> Result<Vec<AttentionGroup>> {
    let config = backend.parse_config(None)?;
    let layers_of =
        |group: usize| (0..LAYERS).filter(move |l| l % num_groups == group).map(|l| AttnLayer(l as u32));
    (0..num_groups)
        .map(|group| {
            let spec = AttentionSpec::new(BLOCK, 8, 128, DType::BF16);
            let spec = match group {
                0 => KvCacheSpec::Full(spec),
                _ => KvCacheSpec::SlidingWindow { attention: spec, sliding_window: WINDOW },
            };
            let info = GroupInfo {
                layers: layers_of(group).collect(),
                max_num_reqs: requests,
                max_num_tokens: requests,
                max_model_len: LENGTH,
                ..GroupInfo::new(spec, 32)
            };
            let shares_with = (group > 1).then_some(1);
            AttentionGroup::new(&**backend, ops, group, info, &config, 1, shares_with)
        })
        .collect()
}

impl Buffers {
    fn new(ops: &dyn Ops, requests: usize, width: usize, num_groups: usize) -> headway_tensor::Result<Self> {
        let table = |_| Ok((Persistent::new(ops, requests * width)?, Persistent::new(ops, requests)?));
        Ok(Self {
            query_start_loc: Persistent::new(ops, requests + 1)?,
            seq_lens: Persistent::new(ops, requests)?,
            tables: (0..num_groups).map(table).collect::<headway_tensor::Result<_>>()?,
        })
    }

    fn write(
        &mut self,
        ops: &dyn Ops,
        requests: usize,
        width: usize,
        commons: &mut Vec<CommonAttentionMetadata>,
    ) -> Result<()> {
        let starts = self.query_start_loc.write_dual(ops, requests + 1, |o| {
            o.iter_mut().enumerate().for_each(|(i, o)| *o = i as i32);
        });
        let lens = vec![LENGTH as i32; requests];
        let seq_lens = self.seq_lens.write(ops, requests, |o| o.copy_from_slice(&lens));
        let inputs = Arc::new(StepInputs::new(starts, seq_lens, lens)?);
        for (table, slots) in &mut self.tables {
            let table = table.write_dual(ops, requests * width, |o| {
                o.iter_mut().enumerate().for_each(|(i, o)| *o = 1 + i as i32);
            });
            let slots: View<i64> = slots.write(ops, requests, |o| {
                let last = (LENGTH - 1) % BLOCK;
                o.iter_mut().enumerate().for_each(|(i, o)| *o = ((i * width + width) * BLOCK + last) as i64);
            });
            let table: Dual<i32> = table;
            commons.push(CommonAttentionMetadata::new(Arc::clone(&inputs), table, width, slots)?);
        }
        Ok(())
    }
}

/// The table's first line.
pub fn head() -> String {
    format!(
        "{:>8} {:>6} {:>6} {:>10} {:>10} {:>10} {:>12} {:>7} {:>8}",
        "requests", "groups", "layers", "build us", "min", "max", "+ inputs us", "builds", "updates"
    )
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:>8} {:>6} {:>6} {:>10.2} {:>10.2} {:>10.2} {:>12.2} {:>7} {:>8}",
            self.requests,
            self.kv_cache_groups,
            self.layers,
            self.build_us,
            self.build_min_us,
            self.build_max_us,
            self.with_inputs_us,
            self.builds_per_step,
            self.table_updates_per_step
        )
    }
}
