//! FlashMLA's decodes out of vLLM's extension module: latent attention over pages of latents, a query of one token a request,
//! by a schedule that is made on the host once for all layers of a group. The function and the order of its arguments are
//! those of [`VLLM`](crate::modules::extension::VLLM).
//!
//! What the kernel is given is checked here; what it throws all the same is an error.

use super::{
    flash_attn::element,
    mla::{LatentCache, room},
};
use crate::{
    CudaExec,
    device::{CudaError, Doing, Result},
    modules::extension::{Extension, Place},
};
use headway_ffi_shim::torch::{Tensor as Described, dtype};
use headway_tensor::{DType, DeviceMem, Exec, View};
use std::sync::Arc;

pub use super::mla::DEEPSEEK as LATENT;
/// Elements of a row: a latent and its rotated part.
pub const ROW: usize = LATENT.0 + LATENT.1;
/// Tokens in a page.
pub const PAGE: usize = 64;
/// Rows of queries and heads that a block takes.
const ROWS: usize = 64;
/// What a request costs a block beside its pages, in pages.
const OVERHEAD: usize = 5;
/// Numbers that say what a block does.
pub const NUMBERS: usize = 8;

/// Shares of a launch: as many blocks as multiprocessors, over the tiles of heads.
pub fn shares(multiprocessors: u32, heads: usize) -> usize {
    (multiprocessors as usize / heads.div_ceil(ROWS).max(1)).max(1)
}

/// Bytes of partial results and sums of so many requests.
pub fn scratch_bytes(multiprocessors: u32, heads: usize, reqs: usize) -> usize {
    let parts = (reqs + shares(multiprocessors, heads)) * heads * size_of::<f32>();
    let sums = reqs * heads * size_of::<f32>();
    [sums, parts, parts * LATENT.0].iter().map(|n| n.next_multiple_of(256)).sum()
}

/// What each share does, and how many parts the requests before each one have: as FlashMLA's kernel
/// `get_mla_metadata` makes it. Pages are dealt out in order, as many a share with a charge for each request, and a
/// request that does not fit goes on in the next one.
pub fn deal(lens: &[i32], shares: usize, numbers: &mut Vec<i32>, parts: &mut Vec<i32>) {
    let pages = |r: usize| (lens[r].max(1) as usize).div_ceil(PAGE);
    let all: usize = (0..lens.len()).map(|r| pages(r) + OVERHEAD).sum();
    let most = all.div_ceil(shares) + OVERHEAD;
    numbers.clear();
    parts.clear();
    parts.push(0);
    let (mut req, mut page, mut part, mut total) = (0, 0, 0, 0);
    for _ in 0..shares {
        let (first, first_page, first_part) = (req, page, part);
        let mut left = most;
        while req < lens.len() {
            let rest = pages(req) - page;
            if left >= rest + OVERHEAD {
                left -= rest + OVERHEAD;
                total += part + 1;
                parts.push(total);
                (req, page, part) = (req + 1, 0, 0);
            } else {
                if left > OVERHEAD {
                    page += left - OVERHEAD;
                    part += 1;
                }
                break;
            }
        }
        // Both included, and the page behind the last.
        let (last, end) = match page {
            0 => (req as i32 - 1, req.checked_sub(1).map_or(0, |r| if lens[r] == 0 { 0 } else { pages(r) })),
            _ => (req as i32, page),
        };
        let whole = |r: i32| usize::try_from(r).map_or(0, |r| if r < lens.len() { pages(r) } else { 0 });
        let held = usize::try_from(last).ok().and_then(|r| lens.get(r)).is_some_and(|&n| n != 0);
        let mut cut = [first_page != 0, held && end != whole(last)];
        if first as i32 == last {
            cut = [cut[0] || cut[1]; 2];
        }
        numbers.extend([
            first as i32,
            last,
            first_page as i32,
            end as i32,
            first_part,
            cut[0].into(),
            cut[1].into(),
            0,
        ]);
    }
}

/// A batch of decodes on the device.
#[derive(Clone, Debug)]
pub struct MlaBatch {
    /// `[reqs]`, tokens.
    pub seq_lens: View<i32>,
    /// `[at least reqs, table_stride]`, pages.
    pub block_table: View<i32>,
    /// Entries from one row to the next.
    pub table_stride: usize,
    /// One more than the highest page that a request has.
    pub pages_end: usize,
    /// `[shares, 8]`, as [`deal`] makes it.
    pub numbers: View<i32>,
    /// `[reqs + 1]`.
    pub parts: View<i32>,
}

/// Runs a layer: weighted latents into `out`, `[reqs, heads, 512]`, of queries `q`, `[reqs, heads, 576]`, both without gaps.
///
/// # Errors
/// Shapes, types, devices; pages past the cache; too little memory; what the kernel throws.
pub fn run(
    cx: &CudaExec,
    module: &Extension,
    heads: usize,
    batch: &MlaBatch,
    scale: f32,
    (q, kind): (&Arc<dyn DeviceMem>, DType),
    cache: &LatentCache<'_>,
    out: &Arc<dyn DeviceMem>,
    scratch: &Arc<dyn DeviceMem>,
) -> Result<()> {
    let wrong = |why: String| CudaError::Argument(format!("FlashMLA: {why}"));
    let reqs = batch.seq_lens.len();
    let views = [&batch.seq_lens, &batch.block_table, &batch.numbers, &batch.parts];
    if views.iter().any(|v| v.device_mem().is_none_or(|m| m.device() != cx.device())) {
        return Err(wrong("a batch that is not on the step's device".into()));
    }
    let multiprocessors = cx.info().multiprocessors;
    let shares = shares(multiprocessors, heads);
    if heads == 0
        || reqs == 0
        || batch.table_stride == 0
        || batch.block_table.len() < reqs * batch.table_stride
        || batch.numbers.len() != shares * NUMBERS
        || batch.parts.len() != reqs + 1
    {
        return Err(wrong(format!(
            "{reqs} requests of {heads} heads with {} numbers, {} parts and a block table of {} entries, {} a row",
            batch.numbers.len(),
            batch.parts.len(),
            batch.block_table.len(),
            batch.table_stride
        )));
    }
    if (cache.width, cache.block_size) != (ROW, PAGE) || batch.pages_end > cache.num_blocks {
        return Err(wrong(format!(
            "pages up to {} over a cache of {} pages of {} rows of {}; {PAGE} rows of {ROW} are supported",
            batch.pages_end, cache.num_blocks, cache.block_size, cache.width
        )));
    }
    let number = element(kind).filter(|_| kind == cache.dtype);
    let number = number.ok_or_else(|| wrong(format!("queries of {kind} over a cache of {}", cache.dtype)))?;
    let size = kind.size();
    let device = cx.device().index;
    let of = |addr: u64, kind: i32, sizes: &[usize]| {
        let mut all = [0; 4];
        all.iter_mut().zip(sizes).for_each(|(to, &n)| *to = n as i64);
        Described::contiguous(addr, kind, device as i32, &all[..sizes.len()])
            .ok_or_else(|| wrong(format!("a tensor of {sizes:?}")))
    };
    let q =
        of(room(cx, "FlashMLA's queries", q, reqs * heads * ROW * size)?, number, &[reqs, 1, heads, ROW])?;
    let to = room(cx, "weighted latents", out, reqs * heads * LATENT.0 * size)?;
    let out = of(to, number, &[reqs, 1, heads, LATENT.0])?;
    let mut pages = of(cache.addr(cx)?, number, &[cache.num_blocks, PAGE, 1, ROW])?;
    pages.strides[0] = (cache.block_stride / size) as i64;
    let lens = of(batch.seq_lens.addr(), dtype::I32, &[reqs])?;
    let table = of(batch.block_table.addr(), dtype::I32, &[reqs, batch.table_stride])?;
    let numbers = of(batch.numbers.addr(), dtype::I32, &[shares, NUMBERS])?;
    let parts = of(batch.parts.addr(), dtype::I32, &[reqs + 1])?;
    let bytes = scratch_bytes(multiprocessors, heads, reqs);
    let scratch = room(cx, "FlashMLA's partial results", scratch, bytes)?;
    let mut a = module.arguments();
    // One new token a request sees all of its keys.
    a.tensor(&q).tensor(&pages).int(LATENT.0 as i64).tensor(&lens).tensor(&table).float(scale).int(false);
    a.tensor_or(Some(&numbers)).tensor_or(Some(&parts)).tensor_or(Some(&out));
    let place = Place {
        device,
        stream: cx.stream().cu_stream().cast(),
        first: None,
        scratch: (scratch, bytes as u64),
    };
    cx.context().bind_to_thread().doing("binding the context")?;
    // SAFETY: the arguments are the function's; shapes, types, devices and bounds were checked, page numbers and the deal
    // on the host when the metadata was made; views keep their lists, and the stream orders who uses the memory.
    let results = unsafe { module.call("dense_decode_fwd", &place, a) }?;
    match results.first() {
        Some(r) if r.data == to => Ok(()),
        _ => Err(wrong(format!(
            "{}: results elsewhere than in the output: {results:?}",
            module.path().display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dealt(lens: &[i32], shares: usize) -> (Vec<[i32; 7]>, Vec<i32>) {
        let (mut numbers, mut parts) = (vec![9], vec![9]);
        deal(lens, shares, &mut numbers, &mut parts);
        assert_eq!((numbers.len(), parts.len()), (shares * NUMBERS, lens.len() + 1));
        (numbers.chunks(NUMBERS).map(|n| n[..7].try_into().unwrap()).collect(), parts)
    }

    #[test]
    fn pages_are_dealt_out_in_order() {
        // 10 pages and a charge of 5 over 3 shares: 5 each, and 5 more to be sure.
        let (of, parts) = dealt(&[640], 3);
        assert_eq!(of, [[0, 0, 0, 5, 0, 1, 1], [0, 0, 5, 10, 1, 1, 1], [1, 0, 0, 10, 0, 0, 0]]);
        assert_eq!(parts, [0, 2]);
        // Two requests of a page: 12 over 2, 11 a share.
        let (of, parts) = dealt(&[64, 1], 2);
        assert_eq!(of, [[0, 0, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0]]);
        assert_eq!(parts, [0, 1, 2]);
        // Nothing to see is a part of no pages.
        let (of, parts) = dealt(&[0, 64], 1);
        assert_eq!((of, parts), (vec![[0, 1, 0, 1, 0, 0, 0]], vec![0, 1, 2]));
    }

    #[test]
    fn every_page_is_somebodys_once() {
        for (lens, shares) in
            [(vec![4096; 7], 66), (vec![1, 70_000, 0, 64, 65, 63, 2000], 132), (vec![12], 132)]
        {
            let (of, parts) = dealt(&lens, shares);
            let mut seen: Vec<Vec<usize>> =
                lens.iter().map(|&n| vec![0; (n as usize).div_ceil(PAGE)]).collect();
            for n in of.iter().filter(|n| (n[0] as usize) < lens.len()) {
                for r in n[0]..=n[1] {
                    let pages = &mut seen[r as usize];
                    let from = if r == n[0] { n[2] as usize } else { 0 };
                    let to = if r == n[1] { n[3] as usize } else { pages.len() };
                    pages[from..to].iter_mut().for_each(|p| *p += 1);
                }
            }
            assert!(seen.iter().flatten().all(|&n| n == 1), "{lens:?}");
            assert!(*parts.last().unwrap() as usize <= lens.len() + shares);
        }
    }

    #[test]
    fn shares_are_blocks_over_tiles_of_heads() {
        assert_eq!([16, 64, 65, 128, 9000].map(|h| shares(132, h)), [132, 132, 66, 66, 1]);
        assert_eq!(scratch_bytes(132, 16, 4), 256 + 136 * 64 + 136 * 64 * 512);
    }
}
