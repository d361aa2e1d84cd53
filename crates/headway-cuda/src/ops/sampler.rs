//! Choosing tokens on the device: what a step's rows want, in buffers that live as long as the model.

use super::linear::alloc;
use crate::{
    CudaExec,
    device::{CudaError, Result},
    kernels::{
        Kernel,
        ops::sample::{self, Choice, MOST_TOKENS, Places, words},
    },
};
use headway_tensor::{DeviceMem, Exec, RowChoice, RowSampler, TensorMut};
use std::{any::Any, sync::Arc};

/// See [`headway_tensor::RowSampler`].
pub(crate) struct CudaSampler {
    kernel: Arc<Kernel>,
    rows: Rows,
    /// [`Choice`]s, bits of penalised tokens and chosen tokens on the device.
    choices: Arc<dyn DeviceMem>,
    seen: Arc<dyn DeviceMem>,
    tokens: Arc<dyn DeviceMem>,
    /// Chosen tokens as they come back.
    found: Vec<i32>,
}

/// The rows that were added, as the device takes them.
struct Rows {
    vocab: usize,
    most: usize,
    choices: Vec<Choice>,
    /// A bit a token, [`words`] a row; of rows with a penalty alone.
    seen: Vec<u32>,
}

impl Rows {
    fn push(&mut self, c: &RowChoice<'_>) -> bool {
        let (Ok(row), true) = (i32::try_from(c.row), self.choices.len() < self.most) else { return false };
        let penalised = c.repetition_penalty != 1.0;
        let history = || c.history.into_iter().flatten().map(|t| *t as usize);
        if penalised && history().any(|t| t >= self.vocab) {
            return false;
        }
        let seen = match penalised {
            true => {
                let first = self.seen.len();
                self.seen.resize(first + words(self.vocab), 0);
                history().for_each(|t| self.seen[first + t / 32] |= 1 << (t % 32));
                (first / words(self.vocab)) as i32
            }
            false => -1,
        };
        self.choices.push(Choice {
            uniform: c.uniform,
            row,
            top_k: if c.top_k < self.vocab { c.top_k as i32 } else { 0 },
            temperature: c.temperature,
            top_p: c.top_p,
            min_p: c.min_p,
            penalty: c.repetition_penalty,
            seen,
            unused: 0,
        });
        true
    }

    fn clear(&mut self) {
        self.choices.clear();
        self.seen.clear();
    }
}

impl CudaSampler {
    /// For steps of up to `max_rows` rows of logits; `None`: a vocabulary that is too large.
    ///
    /// # Errors
    /// No memory; the compiler's words.
    pub fn new(cx: &CudaExec, max_rows: usize, vocab: usize) -> Result<Option<Self>> {
        if vocab == 0 || vocab > MOST_TOKENS || max_rows == 0 {
            return Ok(None);
        }
        let seen = max_rows * words(vocab);
        Ok(Some(Self {
            kernel: sample::load(cx)?,
            choices: alloc(cx, max_rows * size_of::<Choice>())?,
            seen: alloc(cx, seen * size_of::<u32>())?,
            tokens: alloc(cx, max_rows * size_of::<i32>())?,
            found: vec![0; max_rows],
            rows: Rows {
                vocab,
                most: max_rows,
                choices: Vec::with_capacity(max_rows),
                seen: Vec::with_capacity(seen),
            },
        }))
    }

    fn run(&mut self, cx: &CudaExec, logits: TensorMut<'_>, tokens: &mut Vec<Option<u32>>) -> Result<()> {
        let rows = &self.rows;
        if rows.choices.is_empty() {
            return Ok(());
        }
        cx.upload(&self.choices, 0, bytemuck::cast_slice(&rows.choices));
        if !rows.seen.is_empty() {
            cx.upload(&self.seen, 0, bytemuck::cast_slice(&rows.seen));
        }
        let places = Places { choices: &self.choices, seen: &self.seen, tokens: &self.tokens };
        sample::sample(cx, &self.kernel, logits, rows.vocab, &rows.choices, &places)?;
        let found = &mut self.found[..rows.choices.len()];
        cx.read(&self.tokens, 0, bytemuck::cast_slice_mut(found))?;
        tokens.extend(found.iter().map(|t| u32::try_from(*t).ok()));
        Ok(())
    }
}

impl RowSampler for CudaSampler {
    fn push(&mut self, choice: &RowChoice<'_>) -> bool {
        self.rows.push(choice)
    }

    fn choose(
        &mut self,
        cx: &dyn Exec,
        logits: TensorMut<'_>,
        tokens: &mut Vec<Option<u32>>,
    ) -> headway_tensor::Result<()> {
        tokens.clear();
        let Some(cx) = (cx as &dyn Any).downcast_ref::<CudaExec>() else {
            return Err(CudaError::Argument("sampling: buffers of CUDA on another device".into()).into());
        };
        let outcome = self.run(cx, logits, tokens);
        self.rows.clear();
        Ok(outcome?)
    }

    fn clear(&mut self) {
        self.rows.clear();
    }

    fn bytes(&self) -> usize {
        self.choices.bytes() + self.seen.bytes() + self.tokens.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice<'a>(row: usize, penalty: f32, history: [&'a [u32]; 2]) -> RowChoice<'a> {
        RowChoice {
            row,
            temperature: 1.0,
            top_k: 7,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: penalty,
            history,
            uniform: 0.5,
        }
    }

    #[test]
    fn rows_are_taken_with_the_bits_of_what_is_penalised() {
        let mut rows = Rows { vocab: 70, most: 3, choices: vec![], seen: vec![] };
        assert!(rows.push(&choice(4, 1.0, [&[99], &[]])), "without a penalty nobody looks at tokens");
        assert!(rows.push(&choice(5, 2.0, [&[0, 33, 33], &[69]])));
        assert!(!rows.push(&choice(6, 2.0, [&[3], &[70]])), "a token outside the vocabulary");
        assert!(rows.push(&RowChoice { top_k: 70, ..choice(7, 0.5, [&[], &[2]]) }));
        assert!(!rows.push(&choice(8, 1.0, [&[], &[]])), "more rows than there is room for");
        assert_eq!(rows.seen, [1, 2, 1 << 5, 4, 0, 0]);
        let found = rows.choices.iter().map(|c| (c.row, c.seen, c.top_k)).collect::<Vec<_>>();
        assert_eq!(found, [(4, -1, 7), (5, 0, 7), (7, 1, 0)]);
    }
}
