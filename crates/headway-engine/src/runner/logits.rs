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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::{Row, SamplingParams};
    use headway_tensor::{
        Activation, DeviceMem, Exec, Linear, LinearPart, Result, RopeStyle, RowChoice, Tensor, TensorRef,
        View,
    };
    use std::{cell::RefCell, sync::Arc};

    const AWAY: Device = Device { kind: "away", index: 0 };

    /// A device whose memory holds at every place the number of that place, and that notes which are read.
    #[derive(Default)]
    struct Away(RefCell<Vec<(u64, u64)>>);

    #[derive(Debug)]
    struct Region(usize);

    impl DeviceMem for Region {
        fn device(&self) -> Device {
            AWAY
        }
        fn addr(&self) -> u64 {
            0
        }
        fn bytes(&self) -> usize {
            self.0
        }
    }

    impl Exec for Away {
        fn device(&self) -> Device {
            AWAY
        }
        fn alloc(&self, bytes: usize) -> Result<Option<Arc<dyn DeviceMem>>> {
            Ok(Some(Arc::new(Region(bytes))))
        }
        fn upload(&self, _: &Arc<dyn DeviceMem>, _: usize, _: &[u8]) {}
    }

    fn none<T>() -> Result<T> {
        Err(TensorError::Unsupported("it only reads".into()))
    }

    impl Ops for Away {
        fn read(&self, x: TensorRef<'_>, to: &mut [u8]) -> Result<()> {
            let first = x.device_addr().unwrap_or(0) / 4;
            let count = to.len() as u64 / 4;
            self.0.borrow_mut().push((first, first + count));
            let values: Vec<f32> = (first..first + count).map(|i| i as f32).collect();
            to.copy_from_slice(bytemuck::cast_slice(&values));
            Ok(())
        }
        fn load_linear(&self, _: Vec<LinearPart>, _: Option<DType>) -> Result<Arc<dyn Linear>> {
            none()
        }
        fn linear(&self, _: &dyn Linear, _: TensorRef<'_>, _: TensorMut<'_>) -> Result<()> {
            none()
        }
        fn embed(&self, _: &dyn Linear, _: &View<i32>, _: f32, _: TensorMut<'_>) -> Result<()> {
            none()
        }
        fn rms_norm(&self, _: TensorRef<'_>, _: &Tensor, _: f32, _: TensorMut<'_>) -> Result<()> {
            none()
        }
        fn rms_norm_in_place(&self, _: TensorMut<'_>, _: &Tensor, _: f32) -> Result<()> {
            none()
        }
        fn add_rms_norm(
            &self,
            _: TensorMut<'_>,
            _: TensorRef<'_>,
            _: &Tensor,
            _: f32,
            _: TensorMut<'_>,
        ) -> Result<()> {
            none()
        }
        fn add(&self, _: TensorMut<'_>, _: TensorRef<'_>) -> Result<()> {
            none()
        }
        fn rope(&self, _: TensorMut<'_>, _: &View<i32>, _: &Tensor, _: RopeStyle) -> Result<()> {
            none()
        }
        fn gated(&self, _: Activation, _: TensorRef<'_>, _: TensorMut<'_>) -> Result<()> {
            none()
        }
        fn gather_rows(&self, _: TensorRef<'_>, _: &View<i32>, _: TensorMut<'_>) -> Result<()> {
            none()
        }
        fn scale_and_cap(&self, _: TensorMut<'_>, _: f32, _: Option<f32>) -> Result<()> {
            none()
        }
    }

    /// Has token 9 for every row but row 3.
    #[derive(Default)]
    struct Nine(Vec<usize>);

    impl RowSampler for Nine {
        fn push(&mut self, choice: &RowChoice<'_>) -> bool {
            self.0.push(choice.row);
            true
        }
        fn choose(&mut self, _: &dyn Exec, _: TensorMut<'_>, tokens: &mut Vec<Option<u32>>) -> Result<()> {
            tokens.extend(self.0.drain(..).map(|row| (row != 3).then_some(9)));
            Ok(())
        }
        fn clear(&mut self) {
            self.0.clear();
        }
        fn bytes(&self) -> usize {
            0
        }
    }

    /// What is read of six rows of four logits, and whether those the device has no token of are there.
    fn reads(asked: &[usize], seen: bool) -> Vec<(u64, u64)> {
        let (ops, mut device, mut choices) = (Away::default(), Nine::default(), DeviceChoices::default());
        let params = SamplingParams::greedy();
        choices.begin(6);
        for row in asked {
            choices.ask(&mut device, *row, &Row::new(&params, &[], 0));
        }
        let mut logits = Tensor::zeros(&ops, DType::F32, &[6, 4]).unwrap();
        let (mut copy, mut wait) = (vec![], Duration::ZERO);
        let (rows, sampler) = (logits.view_mut(), Some(&mut device as &mut dyn RowSampler));
        let step = StepLogits { ops: &ops, rows, copy: &mut copy, sampler, wait: &mut wait };
        let found = step.settle(&mut choices, seen).unwrap();
        for (row, values) in found.chunks_exact(4).enumerate() {
            let there = (0..4).all(|i| values[i] == (row * 4 + i) as f32);
            assert!(there || choices.token(row) == Some(9) && !seen, "row {row} of {asked:?}: {values:?}");
        }
        assert_eq!(found.len(), 24);
        ops.0.take()
    }

    #[test]
    fn only_rows_without_a_token_come_to_the_host() {
        assert_eq!(reads(&[0, 1, 2, 4, 5], false), [(12, 16)]);
        assert_eq!(reads(&[1, 2], false), [(0, 4), (12, 24)]);
        // Row 3 has no answer.
        assert_eq!(reads(&[0, 1, 2, 3, 4, 5], false), [(12, 16)]);
        assert_eq!(reads(&[], false), [(0, 24)]);
        assert_eq!(reads(&[0, 1, 2, 4, 5], true), [(0, 24)], "somebody looks at all of them");
    }
}
