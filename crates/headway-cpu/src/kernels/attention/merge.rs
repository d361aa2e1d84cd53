//! Chunk results: begun, merged in ascending order, kept in slots where a row's chunks are split over
//! items, and finished into the output.
//!
//! A partial result is a row's maximum m, sum l = Σ e^(s−m) and values a = Σ e^(s−m)·v. Merging two is
//! exact arithmetic's identity over log-sum-exp, so any number of chunks gives one softmax.

use super::{
    lanes::Lanes,
    level::Level,
    math::exp1,
    pass::Pass,
    plan::{CHUNK, Split},
    shape::SLOT_VALUES,
};

/// Where a row's partial result lies: maximum and sum, and the values.
#[derive(Clone, Copy)]
pub(super) struct Partial {
    pub(super) state: *mut f32,
    pub(super) values: *mut f32,
}

/// The running chunk's result of a row.
fn chunk_of(p: &Pass<'_>, row: usize) -> Partial {
    Partial { state: p.state(row, 0), values: p.acc(row) }
}

/// The merged chunks' result of a row.
fn total_of(p: &Pass<'_>, row: usize) -> Partial {
    Partial { state: p.state(row, 1), values: p.total(row) }
}

/// The slot of a row and chunk of a split.
fn slot_of(p: &Pass<'_>, split: &Split, chunk: usize, row: usize) -> Partial {
    let (token, head) = p.token_and_head(row);
    let row = (token - p.work.item.q_begin as usize) * p.job.shape.num_heads + head;
    let slot = split.first_slot + (chunk - split.chunk_begin as usize) * split.rows + row;
    let at = p.job.slots.wrapping_add(slot * p.job.shape.slot_floats());
    Partial { state: at, values: at.wrapping_add(SLOT_VALUES) }
}

/// Begins a chunk: maximum −∞, sum and values 0, for every row.
///
/// # Safety
/// As `Pass`'s methods.
pub(super) unsafe fn clear_chunk(p: &Pass<'_>) {
    let width = p.job.shape.head_size_v;
    // SAFETY: rows fit the scratch.
    unsafe {
        for row in 0..p.rows {
            let c = chunk_of(p, row);
            c.state.write(f32::NEG_INFINITY);
            c.state.add(1).write(0.0);
            std::ptr::write_bytes(c.values, 0, width);
        }
    }
}

/// Whether a row sees a key of the chunk, and whether it sees one of an earlier chunk.
///
/// # Safety
/// As [`Pass::bounds`].
unsafe fn in_chunk(p: &Pass<'_>, row: usize, chunk: usize) -> (bool, bool) {
    // SAFETY: a row of the pass.
    let (low, high) = unsafe { p.bounds(row) };
    let (begin, prefix) = (chunk * CHUNK, p.work.prefix.min(high));
    let here = low < begin + CHUNK && high > begin && low < high;
    (here || begin < prefix, low < begin || (begin > 0 && prefix > 0))
}

/// Takes the running chunk's results into the merged ones, or into the split's slots.
///
/// # Safety
/// As `Pass`'s methods; the chunk is one of the item's.
pub(super) unsafe fn keep_chunk<A: Level>(p: &Pass<'_>, chunk: usize) {
    let width = p.job.shape.head_size_v;
    // SAFETY: rows of the pass; slots of the split, which no other item writes.
    unsafe {
        for row in 0..p.rows {
            let (here, before) = in_chunk(p, row, chunk);
            match &p.work.split {
                _ if !here => {}
                Some((split, _)) => copy(chunk_of(p, row), slot_of(p, split, chunk, row), width),
                None if before => A::merge(chunk_of(p, row), total_of(p, row), width),
                None => copy(chunk_of(p, row), total_of(p, row), width),
            }
        }
    }
}

/// Merges the slots of a split, all parts of which are done, and writes the rows.
///
/// # Safety
/// As `Pass`'s methods; the other parts' slots are visible to this thread.
pub(super) unsafe fn merge_split<A: Level>(p: &Pass<'_>, split: Split) {
    let width = p.job.shape.head_size_v;
    // SAFETY: rows of the pass; a slot is read only where its row sees a key of the chunk, and then
    // one of the parts wrote it.
    unsafe {
        p.prepare::<A>();
        for chunk in split.chunk_begin as usize..split.chunk_end as usize {
            for row in 0..p.rows {
                match in_chunk(p, row, chunk) {
                    (false, _) => {}
                    (true, true) => A::merge(slot_of(p, &split, chunk, row), total_of(p, row), width),
                    (true, false) => copy(slot_of(p, &split, chunk, row), total_of(p, row), width),
                }
            }
        }
        finish::<A>(p);
    }
}

/// # Safety
/// Both have `width` values, in different memory.
unsafe fn copy(from: Partial, to: Partial, width: usize) {
    // SAFETY: as the caller has promised.
    unsafe {
        std::ptr::copy_nonoverlapping(from.state, to.state, 2);
        std::ptr::copy_nonoverlapping(from.values, to.values, width);
    }
}

/// Merges a chunk's result into what earlier chunks gave.
///
/// # Safety
/// The instruction set of `L`; as [`copy`], `width` a multiple of 8.
#[inline(always)]
pub(super) unsafe fn merge<L: Lanes>(part: Partial, total: Partial, width: usize) {
    // SAFETY: as the caller has promised.
    unsafe {
        let (m, l) = (*part.state, *part.state.add(1));
        let (mt, lt) = (*total.state, *total.state.add(1));
        let top = if mt > m { mt } else { m };
        let base = if top == f32::NEG_INFINITY { 0.0 } else { top };
        let (old, new) = (exp1::<L>(mt - base), exp1::<L>(m - base));
        total.state.write(top);
        total.state.add(1).write(lt * old + l * new);
        let (old, new) = (L::Narrow::splat(old), L::Narrow::splat(new));
        for c in (0..width).step_by(8) {
            let at = total.values.add(c).cast::<u8>();
            let scaled = L::Narrow::mul(L::Narrow::load(at.cast_const()), old);
            L::Narrow::fma(L::Narrow::load(part.values.add(c).cast_const().cast()), new, scaled).store(at);
        }
    }
}

/// Takes a sink's logit into a row's maximum and sum; returns the factor that its values need.
///
/// # Safety
/// The instruction set of `L`; maximum and sum at `state`.
#[inline(always)]
pub(super) unsafe fn sink<L: Lanes>(state: *mut f32, sink: f32) -> f32 {
    // SAFETY: as the caller has promised.
    unsafe {
        let (m, l) = (*state, *state.add(1));
        let top = if m > sink { m } else { sink };
        let base = if top == f32::NEG_INFINITY { 0.0 } else { top };
        let weight = exp1::<L>(m - base);
        state.write(top);
        state.add(1).write(l * weight + exp1::<L>(sink - base));
        weight
    }
}

/// Merges with the result over other keys where there is one, divides by the denominator (with the head's sink,
/// where there is one) and writes the rows; a row that sees no key is 0, or stays as it is.
///
/// # Safety
/// As `Pass`'s methods; the merged results of every row that sees a key are there.
pub(super) unsafe fn finish<A: Level>(p: &Pass<'_>) {
    // SAFETY: rows of the pass.
    unsafe {
        for row in 0..p.rows {
            let sees_none = p.bounds(row).1 == 0;
            let total = total_of(p, row);
            let sink = p.job.sinks.map(|s| *s.get_unchecked(p.token_and_head(row).1));
            if p.job.merge && sees_none {
                continue;
            }
            if sees_none {
                std::ptr::write_bytes(total.values, 0, p.job.shape.head_size_v);
                p.write_row::<A>(row, total.values, 0.0);
                p.write_lse(row, || sink.unwrap_or(f32::NEG_INFINITY));
                continue;
            }
            if p.job.merge {
                let mut state = [p.lse(row), 1.0];
                let earlier = Partial { state: state.as_mut_ptr(), values: p.out_row(row).cast() };
                A::merge(earlier, total, p.job.shape.head_size_v);
            }
            let mut factor = p.job.v_scale;
            if let Some(sink) = sink {
                factor *= A::sink(total.state, sink);
            }
            let (m, l) = (*total.state, *total.state.add(1));
            // Only where every score is −∞ is the sum 0; then no key has a weight.
            p.write_row::<A>(row, total.values, if l == 0.0 { 0.0 } else { factor / l });
            p.write_lse(row, || m + l.ln());
        }
    }
}
