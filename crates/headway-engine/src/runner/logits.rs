//! [`StepLogits`]: the logits of a step where they were computed. On a device it chooses the tokens of the rows that it
//! was given, and only the others' logits come to the host.

use crate::{models::ModelError, sampling::DeviceChoices};
use headway_tensor::{DType, Device, Ops, RowSampler, TensorError, TensorMut};
use std::{
    ops::Range,
    time::{Duration, Instant},
};

/// A step's logits, `[rows, vocab_size]`, and what brings tokens of them.
pub struct StepLogits<'a> {
    pub(super) ops: &'a dyn Ops,
    pub(super) rows: TensorMut<'a>,
    /// The host's copy, where there is one.
    pub(super) copy: &'a mut Vec<f32>,
    pub(super) sampler: Option<&'a mut dyn RowSampler>,
    /// Where waiting for the device is added up.
    pub(super) wait: &'a mut Duration,
}

impl<'a> StepLogits<'a> {
    /// What chooses tokens on the device; `None`: the host does.
    pub fn sampler(&mut self) -> Option<&mut dyn RowSampler> {
        match &mut self.sampler {
            Some(sampler) => Some(&mut **sampler),
            None => None,
        }
    }

    /// Has the device choose from the rows that it was given, and returns all rows, `[rows, vocab_size]`: those that it
    /// has no token of are the logits. `seen`: all are, because somebody looks at them.
    ///
    /// # Errors
    /// Logits that are not float32; the device's own.
    pub fn settle(self, choices: &mut DeviceChoices, seen: bool) -> Result<&'a mut [f32], ModelError> {
        let Self { ops, mut rows, copy, sampler, wait } = self;
        if rows.device() == Device::CPU {
            return Ok(rows.into_host()?);
        }
        let start = Instant::now();
        let num_rows = rows.shape().first().copied().unwrap_or(0);
        if seen {
            read(ops, &mut rows, 0..num_rows, copy)?;
        }
        if let Some(sampler) = sampler.filter(|_| choices.any()) {
            choices.take(|found| sampler.choose(ops, rows.reborrow(), found))?;
        }
        let mut next = if seen { num_rows } else { 0 };
        while next < num_rows {
            let first = next;
            let chosen = choices.token(first).is_some();
            while next < num_rows && choices.token(next).is_some() == chosen {
                next += 1;
            }
            match chosen {
                true => copy.resize(size(&rows), 0.0),
                false => read(ops, &mut rows, first..next, copy)?,
            }
        }
        *wait += start.elapsed();
        Ok(copy)
    }
}

fn size(rows: &TensorMut<'_>) -> usize {
    rows.shape().iter().product()
}

/// Copies these rows to where they stand in `copy`, which is made as long as all.
pub(super) fn read(
    ops: &dyn Ops,
    rows: &mut TensorMut<'_>,
    wanted: Range<usize>,
    copy: &mut Vec<f32>,
) -> Result<(), ModelError> {
    if rows.dtype() != DType::F32 {
        let (what, found) = ("rows that a step gives", rows.dtype());
        return Err(TensorError::WrongDType { what, found, supported: "float32" }.into());
    }
    copy.resize(size(rows), 0.0);
    let width = rows.shape().get(1).copied().unwrap_or(1);
    let to = &mut copy[wanted.start * width..wanted.end * width];
    Ok(ops.read(rows.as_ref().rows(wanted)?, bytemuck::cast_slice_mut(to))?)
}
