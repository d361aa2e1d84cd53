//! Lifetime: the model, per layer. A layer of a composition: both parts' layers over one cache. Where a step holds decodes
//! and prefills, new keys and values are written once, and each kernel runs over its own rows.

use crate::{
    DynAttention, KvMut, Qkv, QuantisedOut, Result, StepEntry, process::erased::metadata,
    step::composed::ComposedStep,
};
use headway_tensor::{Exec, TensorMut, TensorRef, View};
use std::ops::Range;

/// One layer of a composition.
pub(crate) struct ComposedLayer {
    /// For decodes.
    pub decode: Box<dyn DynAttention>,
    /// For prefills.
    pub prefill: Box<dyn DynAttention>,
    /// The parts' kernels write the cache themselves, each its rows'.
    pub forward_writes: bool,
}

/// Rows of keys or values; a layer that shares another's cache has none.
fn own_rows<'a>(x: &TensorRef<'a>, rows: Range<usize>) -> Result<TensorRef<'a>> {
    Ok(if x.shape().first() == Some(&0) { *x } else { x.rows(rows)? })
}

fn rows<'a>(x: &Qkv<'a>, rows: Range<usize>) -> Result<Qkv<'a>> {
    Ok(Qkv { q: x.q.rows(rows.clone())?, k: own_rows(&x.k, rows.clone())?, v: own_rows(&x.v, rows)? })
}

/// A part's call: its layer, inputs, cache, entry and rows of the output; `None`: all.
type Call<'c> = dyn FnMut(&dyn DynAttention, &Qkv<'_>, &mut KvMut<'_>, &StepEntry, Option<Range<usize>>) -> Result<()>
    + 'c;

fn rows_of<'a>(out: &'a mut TensorMut<'_>, rows: Option<Range<usize>>) -> Result<TensorMut<'a>> {
    Ok(match rows {
        None => out.reborrow(),
        Some(rows) => out.reborrow().rows(rows)?,
    })
}

impl ComposedLayer {
    fn each(
        &self,
        cx: &dyn Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        entry: &StepEntry,
        call: &mut Call<'_>,
    ) -> Result<()> {
        match metadata::<ComposedStep>(entry)? {
            // Each part makes itself ready, and leaves zeros.
            None => {
                call(&*self.decode, x, kv, entry, None)?;
                call(&*self.prefill, x, kv, entry, None)
            }
            Some(ComposedStep::Decodes(of)) => call(&*self.decode, x, kv, of, None),
            Some(ComposedStep::Prefills(of)) => call(&*self.prefill, x, kv, of, None),
            Some(ComposedStep::Both { decodes, prefills }) => {
                if !kv.shared && kv.num_blocks > 0 && !self.forward_writes {
                    self.decode.write_kv_cache(cx, x, kv, entry.slot_mapping())?;
                }
                let shared = kv.shared || !self.forward_writes;
                let mut kv = KvMut { buf: &mut *kv.buf, shared, ..*kv };
                for (layer, part) in [(&self.decode, decodes), (&self.prefill, prefills)] {
                    let tokens = part.slice.tokens.clone();
                    call(&**layer, &rows(x, tokens.clone())?, &mut kv, &part.of, Some(tokens))?;
                }
                Ok(())
            }
        }
    }
}

impl DynAttention for ComposedLayer {
    fn run(
        &self,
        cx: &dyn Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        entry: &StepEntry,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        self.each(cx, x, kv, entry, &mut |layer, x, kv, entry, rows| {
            layer.run(cx, x, kv, entry, rows_of(&mut out, rows)?)
        })
    }

    fn run_quantised(
        &self,
        cx: &dyn Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        entry: &StepEntry,
        out: QuantisedOut<'_>,
    ) -> Result<()> {
        let QuantisedOut { quant, mut codes, mut scales } = out;
        self.each(cx, x, kv, entry, &mut |layer, x, kv, entry, rows| {
            let codes = rows_of(&mut codes, rows.clone())?;
            // Rules without scales of their own leave no room for any.
            let some = !scales.shape().contains(&0);
            let scales = rows_of(&mut scales, rows.filter(|_| some))?;
            layer.run_quantised(cx, x, kv, entry, QuantisedOut { quant, codes, scales })
        })
    }

    fn write_kv_cache(
        &self,
        cx: &dyn Exec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        slot_mapping: &View<i64>,
    ) -> Result<()> {
        self.decode.write_kv_cache(cx, x, kv, slot_mapping)
    }
}
