//! Microseconds of the decode kernel of latent attention with its merge, without the products around it: what published
//! figures of such kernels measure. 512 + 64 wide, bfloat16, context 4096, pages of 64 scattered over the cache. FlashMLA's beside
//! it, where it was fetched.
//!
//! `cargo run --release -p headway-cuda --example cuda_mla_speed`

use headway_cuda::{
    CudaError, CudaExec, CudaOptions,
    kernels::{
        attention::{Causality, Planner, Request},
        flash_mla,
        memory::MemoryKernels,
        mla::{DecodeBatch, DecodeForm, DecodeKernels, DecodeNumbers, Dims, LatentCache, decode},
    },
    modules::{
        extension::{Extension, Extensions},
        installed,
    },
};
use headway_tensor::{DType, DeviceMem, Exec, Persistent, Tensor, View};
use std::{sync::Arc, time::Duration};

const CONTEXT: usize = 4096;
const PAGE: usize = 64;
/// Bytes of latents that calls go through at least, so that the second-level cache does not help.
const COLD: usize = 300 << 20;

fn main() -> Result<(), CudaError> {
    let cx = CudaExec::open(CudaOptions::default())?;
    println!("{}, {}", cx.info().name, cx.info().driver);
    println!("heads batch      us   TFLOP/s    GB/s  tiles  FlashMLA, us   TFLOP/s    GB/s");
    let module = fetched()?;
    for heads in [16, 128] {
        for batch in [1, 8, 32, 64, 128] {
            let (seconds, tiles) = measure(&cx, heads, batch)?;
            let bytes = (batch * CONTEXT * 576 * 2) as f64;
            let flops = (2 * heads * batch * CONTEXT * (576 + 512)) as f64;
            let rates = |seconds: f64| {
                format!("{:7.1} {:9.1} {:7.0}", seconds * 1e6, flops / seconds / 1e12, bytes / seconds / 1e9)
            };
            let other = match &module {
                Some(module) => rates(measure_flash_mla(&cx, module, heads, batch)?),
                None => "not fetched".into(),
            };
            println!("{heads:5} {batch:5} {} {tiles:6}       {other}", rates(seconds));
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

    let latents = Latents::new(cx, batch)?;
    let (cache, tables, rotation) = (latents.cache(), &latents.tables, latents.tables.len());
    let fill = MemoryKernels::new(cx)?;
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
    Ok((replays(cx, rotation, call)?, list.len() - 1))
}

/// Seconds of FlashMLA's kernels, by the deal that headway makes.
fn measure_flash_mla(
    cx: &CudaExec,
    module: &Extension,
    heads: usize,
    batch: usize,
) -> Result<f64, CudaError> {
    let latents = Latents::new(cx, batch)?;
    let multiprocessors = cx.info().multiprocessors;
    let (mut numbers, mut parts) = (vec![], vec![]);
    let lens = vec![CONTEXT as i32; batch];
    flash_mla::deal(&lens, flash_mla::shares(multiprocessors, heads), &mut numbers, &mut parts);
    let lists = (view(cx, &lens)?, view(cx, &numbers)?, view(cx, &parts)?);
    let batches = latents.tables.iter().map(|table| flash_mla::MlaBatch {
        seq_lens: lists.0.clone(),
        block_table: table.clone(),
        table_stride: CONTEXT / PAGE,
        pages_end: latents.num_blocks,
        numbers: lists.1.clone(),
        parts: lists.2.clone(),
    });
    let batches = batches.collect::<Vec<_>>();
    let q = memory(cx, batch * heads * flash_mla::ROW * 2)?;
    MemoryKernels::new(cx)?.fill(cx, &q)?;
    let out = memory(cx, batch * heads * flash_mla::LATENT.0 * 2)?;
    let scratch = memory(cx, flash_mla::scratch_bytes(multiprocessors, heads, batch))?;
    replays(cx, batches.len(), |i| {
        let (of, q) = (&batches[i % batches.len()], (&q, DType::BF16));
        flash_mla::run(cx, module, heads, of, 0.05, q, &latents.cache(), &out, &scratch)
    })
}

/// More latents than the second-level cache holds, and block tables that scatter a batch over them.
struct Latents {
    memory: Arc<dyn DeviceMem>,
    num_blocks: usize,
    tables: Vec<View<i32>>,
}

impl Latents {
    fn new(cx: &CudaExec, batch: usize) -> Result<Self, CudaError> {
        let blocks = batch * CONTEXT / PAGE;
        let rotation = COLD.div_ceil(blocks * PAGE * 576 * 2);
        let num_blocks = blocks * rotation;
        let memory = memory(cx, num_blocks * PAGE * 576 * 2)?;
        MemoryKernels::new(cx)?.fill(cx, &memory)?;
        // A step that has no factor in common with the number of blocks scatters them.
        let scattered = |i: usize| (i * 7919 % num_blocks) as i32;
        let table = |r: usize| view(cx, &(0..blocks).map(|i| scattered(r * blocks + i)).collect::<Vec<_>>());
        Ok(Self { memory, num_blocks, tables: (0..rotation).map(table).collect::<Result<_, _>>()? })
    }

    fn cache(&self) -> LatentCache<'_> {
        LatentCache {
            memory: &self.memory,
            offset: 0,
            block_stride: PAGE * 576 * 2,
            num_blocks: self.num_blocks,
            block_size: PAGE,
            width: 576,
            dtype: DType::BF16,
        }
    }
}

/// FlashMLA's module, where it was fetched.
fn fetched() -> Result<Option<Arc<Extension>>, CudaError> {
    let failed = |e: String| CudaError::Argument(e);
    let folder = installed().as_ref().map_err(|e| failed(e.to_string()))?;
    let Some(entry) = folder.extension(Extensions::FlashMla) else { return Ok(None) };
    Ok(Some(Extension::open(folder, entry).map_err(|e| failed(e.to_string()))?))
}

/// Seconds a call, in replays of a graph.
fn replays(
    cx: &CudaExec,
    rotation: usize,
    call: impl Fn(usize) -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    call(0)?;
    cx.synchronize()?;
    let calls = rotation.max(64).next_multiple_of(rotation);
    let (_, graph) = cx.capture(|| (0..calls).try_for_each(&call))?;
    let (from, to) = (cx.event()?, cx.event()?);
    let mut times = vec![];
    for round in 0..12 {
        // Work before this one lowers the clock of the next: every replay begins on a card at rest.
        std::thread::sleep(Duration::from_millis(50));
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
    Ok(times[times.len() / 2])
}
