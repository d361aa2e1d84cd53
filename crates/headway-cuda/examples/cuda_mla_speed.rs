//! Microseconds of the decode kernel of latent attention with its merge, without the products around it: what published
//! figures of such kernels measure. 512 + 64 wide, bfloat16, context 4096, pages of 64 scattered over the cache.
//!
//! `cargo run --release -p headway-cuda --example cuda_mla_speed`

use headway_cuda::{
    CudaError, CudaExec, CudaOptions,
    kernels::{
        attention::{Causality, Planner, Request},
        memory::MemoryKernels,
        mla::{DecodeBatch, DecodeForm, DecodeKernels, DecodeNumbers, Dims, LatentCache, decode},
    },
};
use headway_tensor::{DType, DeviceMem, Exec, Persistent, Tensor, View};
use std::sync::Arc;

const CONTEXT: usize = 4096;
const PAGE: usize = 64;
/// Bytes of latents that calls go through at least, so that the second-level cache does not help.
const COLD: usize = 300 << 20;

fn main() -> Result<(), CudaError> {
    let cx = CudaExec::open(CudaOptions::default())?;
    println!("{}, {}", cx.info().name, cx.info().driver);
    println!("heads batch      us   TFLOP/s    GB/s  tiles");
    for heads in [16, 128] {
        for batch in [1, 8, 32, 64, 128] {
            let (seconds, tiles) = measure(&cx, heads, batch)?;
            let bytes = (batch * CONTEXT * 576 * 2) as f64;
            let flops = (2 * heads * batch * CONTEXT * (576 + 512)) as f64;
            println!(
                "{heads:5} {batch:5} {:7.1} {:9.1} {:7.0} {tiles:6}",
                seconds * 1e6,
                flops / seconds / 1e12,
                bytes / seconds / 1e9
            );
        }
    }
    Ok(())
}

fn view<T: headway_tensor::Pod>(cx: &CudaExec, list: &[T]) -> Result<View<T>, CudaError> {
    Ok(Persistent::new(cx, list.len())?.write(cx, list.len(), |to| to.copy_from_slice(list)))
}

fn memory(cx: &CudaExec, bytes: usize) -> Result<Arc<dyn DeviceMem>, CudaError> {
    cx.alloc(bytes)?.ok_or_else(|| CudaError::Argument("no device memory".into()))
}

fn measure(cx: &CudaExec, heads: usize, batch: usize) -> Result<(f64, usize), CudaError> {
    let d = Dims { heads, nope: 128, rope: 64, rank: 512, v: 128 };
    let form = DecodeForm::choose(&d, DType::BF16, heads, cx.info().shared_per_block as usize)
        .map_err(CudaError::Argument)?;
    let kernels = DecodeKernels::new(cx, &d, form, (DType::BF16, DType::BF16), false)?;
    let grid = form.slots(&d, DType::BF16, cx.info());
    let mut planner = Planner {
        group: heads,
        kv_heads: 1,
        few_rows: form.rows,
        many_rows: None,
        slots: grid,
        waves: 2,
        window: None,
        batch_invariant: false,
        max_tiles: 0,
        max_part_rows: 0,
    };
    (planner.max_tiles, planner.max_part_rows) = planner.limits(batch, batch);
    let request = Request { q_len: 1, seq_len: CONTEXT, causal: Causality::Yes };
    let mut list = vec![];
    planner.plan(std::iter::repeat_n(request, batch), 0..0, &mut list).map_err(CudaError::Argument)?;
    let mut merges = vec![list[0]];
    merges.extend(list[1..].iter().filter(|t| t.splits > 1 && t.split == 0));
    merges[0].request = merges.len() as i32 - 1;
    let (tiles, merges) = (view(cx, &list)?, view(cx, &merges)?);

    let blocks = batch * CONTEXT / PAGE;
    let rotation = COLD.div_ceil(blocks * PAGE * 576 * 2);
    let num_blocks = blocks * rotation;
    let cache = memory(cx, num_blocks * PAGE * 576 * 2)?;
    let fill = MemoryKernels::new(cx)?;
    fill.fill(cx, &cache)?;
    let cache = LatentCache {
        memory: &cache,
        offset: 0,
        block_stride: PAGE * 576 * 2,
        num_blocks,
        block_size: PAGE,
        width: 576,
        dtype: DType::BF16,
    };
    // A step that has no factor in common with the number of blocks scatters them.
    let scattered = |i: usize| (i * 7919 % num_blocks) as i32;
    let table = |r: usize| view(cx, &(0..blocks).map(|i| scattered(r * blocks + i)).collect::<Vec<_>>());
    let tables = (0..rotation).map(table).collect::<Result<Vec<_>, _>>()?;
    let starts = view(cx, &(0..=batch as i32).collect::<Vec<_>>())?;
    let lens = view(cx, &vec![CONTEXT as i32; batch])?;
    let q = Tensor::zeros(cx, DType::BF16, &[batch, heads, d.qk()])?;
    let [q_latent, out] = [(); 2].map(|()| memory(cx, batch * heads * d.rank * 2));
    let (q_latent, out) = (q_latent?, out?);
    fill.fill(cx, &q_latent)?;
    let part_out = memory(cx, (planner.max_part_rows + grid * form.rows) * d.rank * 4)?;
    let part_sum = memory(cx, planner.max_part_rows * 8)?;
    let next = memory(cx, 8)?;
    cx.zero(&next, 0, 8);
    let call = |i: usize| {
        let batch = DecodeBatch {
            tiles: &tiles,
            merges: &merges,
            block_table: &tables[i % rotation],
            table_stride: CONTEXT / PAGE,
            query_start_loc: &starts,
            seq_lens: &lens,
            tokens: batch,
            part_out: &part_out,
            part_sum: &part_sum,
            next: &next,
            part_rows: planner.max_part_rows,
            grid,
        };
        let numbers = DecodeNumbers { scale: 0.05, v_scale: 1.0 };
        decode(cx, &kernels, &d, &batch, numbers, (&q_latent, q.view()), &cache, &out)
    };
    call(0)?;
    cx.synchronize()?;
    let calls = rotation.max(64).next_multiple_of(rotation);
    let (_, graph) = cx.capture(|| (0..calls).try_for_each(call))?;
    let (from, to) = (cx.event()?, cx.event()?);
    let mut times = vec![];
    for round in 0..12 {
        cx.record(&from)?;
        graph.launch()?;
        cx.record(&to)?;
        let ms = from.elapsed_ms(&to)?;
        if round >= 3 {
            times.push(f64::from(ms) * 1e-3 / calls as f64);
        }
    }
    cx.synchronize()?;
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], list.len() - 1))
}
