//! Which tokens stay: top-k and top-p cuts without sorting the vocabulary.
//!
//! Both work on values where more is more likely, and break ties by index: of equal values the lower index counts as
//! the more likely. A cut is the least likely entry that stays.

use std::cmp::Ordering;

use super::softmax::{self, GLANCE};

/// A value and its index.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) value: f32,
    pub(super) index: u32,
}

impl Entry {
    /// Less is more likely. Values are not NaN.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        other.value.partial_cmp(&self.value).unwrap_or(Ordering::Equal).then(self.index.cmp(&other.index))
    }

    /// Sets to 0 the weights of the entries that are less likely than this cut. `values` are what the cut was made from.
    pub(super) fn apply(&self, values: &[f32], weights: &mut [f32]) {
        // Up to the cut's own place its equals stay, behind it they go: two loops without an index in them.
        let split = (self.index as usize + 1).min(values.len());
        for (value, weight) in values[..split].iter().zip(&mut weights[..split]) {
            *weight = if *value >= self.value { *weight } else { 0.0 };
        }
        for (value, weight) in values[split..].iter().zip(&mut weights[split..]) {
            *weight = if *value > self.value { *weight } else { 0.0 };
        }
    }

    /// As [`Self::apply`], for a cut made from the weights themselves.
    pub(super) fn apply_to(&self, weights: &mut [f32]) {
        let split = (self.index as usize + 1).min(weights.len());
        weights[..split].iter_mut().for_each(|w| *w = if *w >= self.value { *w } else { 0.0 });
        weights[split..].iter_mut().for_each(|w| *w = if *w > self.value { *w } else { 0.0 });
    }
}

/// The `k` most likely entries, in no order, into `found`; `k` at least 1. One pass with a rising threshold.
pub(super) fn top_k(values: &[f32], k: usize, found: &mut Vec<Entry>) {
    found.clear();
    let room = k.saturating_mul(2).clamp(64, values.len().max(64));
    let mut threshold = f32::NEG_INFINITY;
    for (start, chunk) in (0..).step_by(GLANCE).zip(values.chunks(GLANCE)) {
        // Most chunks have nothing above the threshold. Equal values have a higher index than those that made the
        // threshold, so only larger ones matter.
        if found.len() >= k && !softmax::any(chunk, |value| value > threshold) {
            continue;
        }
        for (index, &value) in (start..).zip(chunk) {
            if found.len() < k || value > threshold {
                found.push(Entry { value, index });
                if found.len() > k && found.len() >= room {
                    threshold = keep_best(found, k);
                }
            }
        }
    }
    if found.len() > k {
        keep_best(found, k);
    }
}

/// Keeps the `k` best entries and returns the value of the worst of them.
fn keep_best(found: &mut Vec<Entry>, k: usize) -> f32 {
    let (_, worst, _) = found.select_nth_unstable_by(k - 1, Entry::order);
    let value = worst.value;
    found.truncate(k);
    value
}

/// The top-p cut: the last of the fewest most likely entries whose weights reach `need`. Entries of weight 0 never
/// count. `None` when all together do not reach it, so that everything stays.
///
/// Weights are positive, so their bits order them: entries are summed into bins by their leading bits, and only the
/// bin in which the sum is reached is looked into.
pub(super) fn top_p(
    weights: &[f32],
    need: f64,
    bins: &mut Vec<Bin>,
    found: &mut Vec<Entry>,
) -> Option<Entry> {
    fill_bins(weights, bins);
    let mut before = 0.0;
    // Bin 0 has the weights of 0.
    let reached = (1..NUM_BINS).rev().find(|&b| {
        let sum: f64 = bins[b].iter().sum();
        let reached = before + sum >= need;
        before += if reached { 0.0 } else { sum };
        reached
    })?;
    found.clear();
    for (start, chunk) in (0..).step_by(GLANCE).zip(weights.chunks(GLANCE)) {
        if softmax::any(chunk, |w| bin(w) == reached) {
            let inside = (start..).zip(chunk).filter(|(_, w)| bin(**w) == reached);
            found.extend(inside.map(|(index, &value)| Entry { value, index }));
        }
    }
    Some(reach(found, need - before))
}

/// The sum of a bin, in parts: neighbours often fall into one bin, and one sum would have to wait for the other.
pub(super) type Bin = [f64; 4];

/// The leading bits of a weight of `[0, 1]`: sign, exponent and four bits of the fraction.
const BIN_SHIFT: u32 = 19;
const NUM_BINS: usize = (0x3F80_0000 >> BIN_SHIFT) + 1;

#[inline(always)]
fn bin(weight: f32) -> usize {
    ((weight.to_bits() >> BIN_SHIFT) as usize).min(NUM_BINS - 1)
}

fn fill_bins(weights: &[f32], bins: &mut Vec<Bin>) {
    bins.clear();
    bins.resize(NUM_BINS, Bin::default());
    // After top-k or min-p nearly all weights are 0.
    for chunk in weights.chunks(GLANCE).filter(|chunk| softmax::any(chunk, |w| w > 0.0)) {
        for four in chunk.chunks(4) {
            for (part, &weight) in four.iter().enumerate() {
                bins[bin(weight)][part] += f64::from(weight);
            }
        }
    }
}

/// The last of the fewest most likely of `found` whose weights reach `need`; the very last if rounding leaves a rest.
/// Halves the entries until few are left to sort. `found` is not empty.
fn reach(mut found: &mut [Entry], mut need: f64) -> Entry {
    while found.len() > 32 {
        let middle = found.len() / 2;
        found.select_nth_unstable_by(middle - 1, Entry::order);
        let upper: f64 = found[..middle].iter().map(|e| f64::from(e.value)).sum();
        if upper >= need {
            found = &mut found[..middle];
        } else {
            need -= upper;
            found = &mut found[middle..];
        }
    }
    found.sort_unstable_by(Entry::order);
    let mut sum = 0.0;
    let at = found.iter().position(|e| {
        sum += f64::from(e.value);
        sum >= need
    });
    found[at.unwrap_or(found.len() - 1)]
}
