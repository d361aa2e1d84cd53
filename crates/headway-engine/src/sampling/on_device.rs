//! Rows that the device chooses from: which they are, and what it chose.
//!
//! Lifetime: [`DeviceChoices`] keeps its memory from step to step. The device takes greedy rows and draws with temperature,
//! cuts and the repetition penalty. The host's are rows whose log-probabilities are asked for, with a bias, with penalties
//! that count, or of answers too short to end; and rows without an answer, which it says what is wrong with.

use super::{random, sampler::Row};
use headway_tensor::{RowChoice, RowSampler};

impl<'a> Row<'a> {
    /// As a device takes it, for the logits of row `index`; `None`: a row for the host.
    fn choice(&self, index: usize) -> Option<RowChoice<'a>> {
        let p = self.params;
        let plain = p.logit_bias.is_empty() && p.presence_penalty == 0.0 && p.frequency_penalty == 0.0;
        (plain && p.logprobs.is_none() && !self.is_held_open()).then(|| RowChoice {
            row: index,
            temperature: p.temperature,
            top_k: p.top_k,
            top_p: p.top_p,
            min_p: p.min_p,
            repetition_penalty: p.repetition_penalty,
            history: [self.tokens, self.drafted],
            uniform: if p.is_greedy() { 0.0 } else { random::uniform(self.seed, self.position() as u64) },
        })
    }
}

/// What the device chose of a step's rows.
#[derive(Debug, Default)]
pub struct DeviceChoices {
    /// Rows that were given to it, in order.
    asked: Vec<usize>,
    /// What came back for these.
    found: Vec<Option<u32>>,
    /// By row of logits.
    tokens: Vec<Option<u32>>,
}

impl DeviceChoices {
    /// Begins a step of so many rows of logits, all of them the host's so far.
    pub fn begin(&mut self, rows: usize) {
        self.asked.clear();
        self.found.clear();
        self.tokens.clear();
        self.tokens.resize(rows, None);
    }

    /// Gives row `index` of the logits to the device, where it can choose from it.
    pub fn ask(&mut self, sampler: &mut dyn RowSampler, index: usize, row: &Row<'_>) {
        if row.choice(index).is_some_and(|choice| sampler.push(&choice)) {
            self.asked.push(index);
        }
    }

    /// Whether the device was given a row.
    pub fn any(&self) -> bool {
        !self.asked.is_empty()
    }

    /// Takes what the device chose: `choose` fills in an entry for each row that it was given.
    ///
    /// # Errors
    /// `choose`'s.
    pub fn take<E>(&mut self, choose: impl FnOnce(&mut Vec<Option<u32>>) -> Result<(), E>) -> Result<(), E> {
        choose(&mut self.found)?;
        for (row, token) in self.asked.iter().zip(&self.found) {
            if let Some(of_row) = self.tokens.get_mut(*row) {
                *of_row = *token;
            }
        }
        Ok(())
    }

    /// The device's token of a row; `None`: the host chooses.
    pub fn token(&self, row: usize) -> Option<u32> {
        self.tokens.get(row).copied().flatten()
    }
}
