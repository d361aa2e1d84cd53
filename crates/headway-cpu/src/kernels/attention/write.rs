//! New keys and values into the cache, by slot.
//!
//! Tokens whose slots follow one another in a group of 16 are written together ([`pack`](super::pack)).
//! While one run is written, the lines of the next are on their way: a single token of keys touches
//! every line of its group.

use super::{
    CacheLayout, Form, GROUP, Result, check_rows,
    elem::unit,
    entry::{Pack, pack},
    inputs,
    job::Rows,
    lanes::{LINE, prefetch},
    narrow::{Narrow, narrow},
    pack::{Tokens, columns},
    read_rows,
    shape::Shape,
};
use crate::{Isa, pool::Pool};
use headway_tensor::TensorRef;
use std::cell::RefCell;

/// Fewer elements than this are written by the calling thread.
const WORTH_A_REGION: usize = 1 << 13;
/// Tasks a thread should find.
const TASKS_PER_THREAD: usize = 2;

/// Scatters keys `[tokens, kv_heads, head_size]` and values `[tokens, kv_heads, head_size_v]`: token t
/// goes to slot `slots[t]`; −1 is skipped; tokens past the slots are padding. Values of another type
/// than the cache's are rounded to nearest even; 8-bit types are divided by their scale first, and
/// saturate. Where a slot is named twice, the last token stays.
///
/// # Errors
/// Shapes and dtypes; a slot outside the cache (then nothing is written).
pub fn write_kv(
    (pool, isa): (&Pool, Isa),
    shape: &Shape,
    (k, k_scale): (TensorRef<'_>, f32),
    (v, v_scale): (TensorRef<'_>, f32),
    slots: &[i64],
    cache: &CacheLayout,
    bytes: &mut [u8],
) -> Result<()> {
    if shape.form != Form::KeysAndValues {
        return Err(inputs("keys and values for a cache of latent rows"));
    }
    cache.check(shape, bytes.len())?;
    check_rows("key", k.shape(), shape.num_kv_heads, shape.head_size, slots.len())?;
    check_rows("value", v.shape(), shape.num_kv_heads, shape.head_size_v, slots.len())?;
    if !isa.is_available() {
        return Err(inputs(format!("kernels for {isa} can't run on this machine")));
    }
    check_slots(slots, cache)?;
    let (k_narrow, v_narrow) = (narrow(k.dtype(), cache.dtype)?, narrow(v.dtype(), cache.dtype)?);
    let writer = Writer {
        keys: Side { rows: read_rows(k)?, narrow: k_narrow, scale: k_scale, width: shape.head_size },
        values: Side { rows: read_rows(v)?, narrow: v_narrow, scale: v_scale, width: shape.head_size_v },
        slots,
        block_size: cache.block_size,
        block_stride: cache.block_stride,
        head_bytes: cache.head_bytes(shape),
        size: cache.dtype.size(),
        unit: unit(cache.dtype),
        base: bytes[cache.offset..].as_mut_ptr(),
        pack: pack(isa),
    };
    let heads = shape.num_kv_heads;
    if slots.len() * heads * (shape.head_size + shape.head_size_v) < WORTH_A_REGION {
        // SAFETY: every slot is in the cache, whose blocks lie in `bytes`; rows are there for every
        // slot; the machine has `isa`: all checked above.
        unsafe { writer.write(0..heads, Share { part: 0, parts: 1 }) };
    } else {
        let parts = (pool.threads() * TASKS_PER_THREAD).div_ceil(heads);
        pool.run(heads * parts, &|task, _| {
            let (head, part) = (task % heads, task / heads);
            // SAFETY: as above; different heads and different groups lie in different bytes.
            unsafe { writer.write(head..head + 1, Share { part, parts }) };
        });
    }
    Ok(())
}

/// Scatters latent rows `[tokens, size]` of `shape`, a latent one: as [`write_kv`] for a single row a token.
///
/// # Errors
/// As [`write_kv`]; a shape of keys and values.
pub fn write_latent(
    shape: &Shape,
    (latent, scale): (TensorRef<'_>, f32),
    slots: &[i64],
    cache: &CacheLayout,
    bytes: &mut [u8],
) -> Result<()> {
    if shape.form != Form::Latent {
        return Err(inputs("latent rows for a cache of keys and values"));
    }
    cache.check(shape, bytes.len())?;
    let latent = latent.heads(1)?;
    check_rows("latent", latent.shape(), 1, shape.head_size, slots.len())?;
    check_slots(slots, cache)?;
    let row = shape.head_size * cache.dtype.size();
    let narrow = narrow(latent.dtype(), cache.dtype)?;
    let rows = Side { rows: read_rows(latent)?, narrow, scale, width: shape.head_size };
    let base = bytes[cache.offset..].as_mut_ptr();
    // One thread: a row has few bytes.
    SCRATCH.with_borrow_mut(|scratch| {
        for (token, &slot) in slots.iter().enumerate().filter(|(_, s)| **s >= 0) {
            let (block, at) = (slot as usize / cache.block_size, slot as usize % cache.block_size);
            let run = Run { token, slot: slot as usize, count: 1 };
            // SAFETY: the slot is in the cache, whose blocks lie in `bytes`, both checked above; the token is one
            // of the rows.
            unsafe {
                let x = rows.tokens(0, &run, cache.dtype.size(), scratch);
                x.from.copy_to_nonoverlapping(base.add(block * cache.block_stride + at * row), row);
            }
        }
    });
    Ok(())
}

/// That every slot but −1 lies in the cache.
fn check_slots(slots: &[i64], cache: &CacheLayout) -> Result<()> {
    let total = cache.num_blocks * cache.block_size;
    match slots.iter().enumerate().find(|&(_, &s)| s != -1 && (s < 0 || s as u64 >= total as u64)) {
        None => Ok(()),
        Some((t, s)) => Err(inputs(format!("slot {s} of token {t} is not in a cache of {total} slots"))),
    }
}

/// Groups of 16 slots whose number is `part` modulo `parts`: what one task writes, in the tokens' order.
#[derive(Clone, Copy)]
struct Share {
    part: usize,
    parts: usize,
}

/// Tokens whose slots follow one another in a group.
#[derive(Clone, Copy)]
struct Run {
    token: usize,
    slot: usize,
    count: usize,
}

/// The runs of a share.
fn runs(slots: &[i64], share: Share) -> impl Iterator<Item = Run> {
    let mut token = 0;
    std::iter::from_fn(move || {
        loop {
            let first = *slots.get(token)?;
            if first < 0 {
                token += 1;
                continue;
            }
            let slot = first as usize;
            let most = GROUP - slot % GROUP;
            let follows = |&(n, s): &(usize, &i64)| *s == first + n as i64;
            let count = slots[token..].iter().take(most).enumerate().take_while(follows).count();
            let run = Run { token, slot, count };
            token += count;
            if share.parts == 1 || slot / GROUP % share.parts == share.part {
                return Some(run);
            }
        }
    })
}

/// Keys or values: where they come from, and how they become the cache's type.
struct Side {
    rows: Rows<*const u8>,
    /// `None`: they have it.
    narrow: Option<Narrow>,
    scale: f32,
    width: usize,
}

/// A call's work.
struct Writer<'a> {
    keys: Side,
    values: Side,
    slots: &'a [i64],
    block_size: usize,
    block_stride: usize,
    head_bytes: usize,
    /// Bytes of a cache element.
    size: usize,
    /// Elements that lie side by side: [`unit`].
    unit: usize,
    base: *mut u8,
    pack: Pack,
}
// SAFETY: the rows are only read, and tasks write disjoint bytes.
unsafe impl Sync for Writer<'_> {}

/// Rows of a run in the cache's type, where they have another. float32 for alignment.
type Scratch = [f32; GROUP * 512];

thread_local! {
    /// Made at a thread's first call that needs it: no call allocates.
    static SCRATCH: RefCell<Option<Box<Scratch>>> = const { RefCell::new(None) };
}

impl Writer<'_> {
    /// Writes a share of some heads.
    ///
    /// # Safety
    /// Slots are in the cache, rows there for each; the machine has the level of `pack`; no other
    /// thread writes these heads' groups.
    unsafe fn write(&self, heads: std::ops::Range<usize>, share: Share) {
        let all = heads.flat_map(|head| runs(self.slots, share).map(move |run| (head, run)));
        let mut all = all.peekable();
        SCRATCH.with_borrow_mut(|scratch| {
            while let Some((head, run)) = all.next() {
                if let Some((head, run)) = all.peek() {
                    self.fetch(*head, run);
                }
                // SAFETY: as the caller has promised.
                unsafe { self.write_run(head, &run, scratch) };
            }
        });
    }

    /// Where the run's group of keys and its first unit of values begin.
    fn places(&self, head: usize, run: &Run) -> (*mut u8, *mut u8) {
        let (block, at) = (run.slot / self.block_size, run.slot % self.block_size);
        let page = self.base.wrapping_add(block * self.block_stride + head * self.head_bytes);
        let keys = at / GROUP * GROUP * self.keys.width;
        let values = self.block_size * self.keys.width + at / self.unit * self.unit * self.values.width;
        (page.wrapping_add(keys * self.size), page.wrapping_add(values * self.size))
    }

    /// Asks for the lines of a run.
    fn fetch(&self, head: usize, run: &Run) {
        let (keys, values) = self.places(head, run);
        let key_bytes = GROUP * self.keys.width * self.size;
        let tokens = (run.slot % self.unit + run.count).next_multiple_of(self.unit);
        for (at, bytes) in [(keys, key_bytes), (values, tokens * self.values.width * self.size)] {
            (0..bytes).step_by(LINE).for_each(|line| prefetch(at.wrapping_add(line)));
        }
    }

    /// # Safety
    /// As [`Writer::write`].
    unsafe fn write_run(&self, head: usize, run: &Run, scratch: &mut Option<Box<Scratch>>) {
        let (keys, values) = self.places(head, run);
        let column = keys.wrapping_add(run.slot % GROUP * self.unit * self.size);
        // SAFETY: as the caller has promised; a run lies in one group.
        unsafe {
            let k = self.keys.tokens(head, run, self.size, scratch);
            match self.unit * self.size {
                4 => (self.pack.keys_of_four)(k, self.keys.width / self.unit, column),
                2 => columns::<u16>(k, 0, 0..self.keys.width, column),
                _ => columns::<u8>(k, 0, 0..self.keys.width, column),
            }
            let v = self.values.tokens(head, run, self.size, scratch);
            if self.unit == 2 {
                (self.pack.pairs)(v, run.slot % 2 == 1, self.values.width, values);
            } else {
                let bytes = self.values.width * self.size;
                for t in 0..v.count {
                    let row = v.from.add(t * v.stride);
                    std::ptr::copy_nonoverlapping(row, values.add(t * bytes), bytes);
                }
            }
        }
    }
}

impl Side {
    /// The run's rows of a head in the cache's type.
    ///
    /// # Safety
    /// The rows are there; `size` is that of the type that `narrow` gives.
    unsafe fn tokens(
        &self,
        head: usize,
        run: &Run,
        size: usize,
        scratch: &mut Option<Box<Scratch>>,
    ) -> Tokens {
        let at = run.token * self.rows.token_stride + head * self.rows.head_stride;
        let x = Tokens {
            from: self.rows.base.wrapping_add(at),
            stride: self.rows.token_stride,
            count: run.count,
        };
        let Some(narrow) = self.narrow else { return x };
        let to: *mut u8 = scratch.get_or_insert_with(|| Box::new([0.0; GROUP * 512])).as_mut_ptr().cast();
        let stride = self.width * size;
        for t in 0..x.count {
            // SAFETY: as the caller has promised; 16 heads of at most 512 elements, or one latent row of 1024.
            unsafe { narrow(x.from.add(t * x.stride), to.add(t * stride), self.width, self.scale) };
        }
        Tokens { from: to, stride, ..x }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_stay_in_their_group_and_shares_cover_all_in_order() {
        let slots = [5, 6, 7, -1, 8, 15, 16, 17, 17, 3, 31, 32, 33, -1, -1, 0];
        let all = |share| runs(&slots, share).map(|r| (r.token, r.slot, r.count)).collect::<Vec<_>>();
        let whole = all(Share { part: 0, parts: 1 });
        let want = [
            (0, 5, 3),
            (4, 8, 1),
            (5, 15, 1),
            (6, 16, 2),
            (8, 17, 1),
            (9, 3, 1),
            (10, 31, 1),
            (11, 32, 2),
            (15, 0, 1),
        ];
        assert_eq!(whole, want);
        let mut parts: Vec<_> = (0..3).flat_map(|part| all(Share { part, parts: 3 })).collect();
        for part in 0..3 {
            let share = all(Share { part, parts: 3 });
            assert!(share.iter().all(|(_, slot, _)| slot / GROUP % 3 == part) && share.is_sorted());
        }
        parts.sort_unstable();
        assert_eq!(parts, want);
    }
}
