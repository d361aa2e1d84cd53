//! A KV cache group's block table. From one step to the next little of it changes: what is there already is not written
//! again, and a device gets what changed.

use headway_attention::Result;
use headway_tensor::{Dual, Exec, Persistent};
use std::ops::Range;

/// Rows of block numbers; what is past a request's blocks is 0, the null block.
pub(super) struct BlockTable {
    entries: Persistent<i32>,
    stride: usize,
    /// Of each row, the columns that may hold something else than the null block.
    filled: Vec<usize>,
}

impl BlockTable {
    /// For so many requests of at most so many blocks.
    ///
    /// # Errors
    /// No memory.
    pub fn new(cx: &dyn Exec, max_num_reqs: usize, max_blocks: usize) -> headway_tensor::Result<Self> {
        let entries = Persistent::new(cx, max_num_reqs * max_blocks)?;
        Ok(Self { entries, stride: 0, filled: vec![0; max_num_reqs] })
    }

    /// Writes a row for each of `blocks`, and null rows behind them: `num_rows` of `stride` entries. After a failure the
    /// table still holds what the device does.
    ///
    /// # Errors
    /// That of `blocks`.
    pub fn write<'t>(
        &mut self,
        cx: &dyn Exec,
        (num_rows, stride): (usize, usize),
        mut blocks: impl Iterator<Item = Result<&'t [u32]>>,
    ) -> Result<()> {
        if stride != self.stride {
            self.stride = stride;
            self.filled.fill(stride);
        }
        let mut outcome = Ok(());
        self.entries.update(cx, num_rows * stride, |o, changes| {
            for (i, (row, filled)) in o.chunks_exact_mut(stride.max(1)).zip(&mut self.filled).enumerate() {
                let blocks = match blocks.next().transpose() {
                    Ok(blocks) => blocks.unwrap_or(&[]),
                    Err(e) => {
                        outcome = Err(e);
                        return;
                    }
                };
                let changed = write_row(row, filled, blocks);
                changes.add(i * stride + changed.start..i * stride + changed.end);
            }
        });
        outcome
    }

    /// Rows as they were written last.
    pub fn rows(&self, num_rows: usize) -> Dual<i32> {
        self.entries.dual(num_rows * self.stride)
    }

    /// How often it could not be recycled.
    pub fn reallocs(&self) -> usize {
        self.entries.reallocs()
    }
}

/// The columns that changed.
fn write_row(row: &mut [i32], filled: &mut usize, blocks: &[u32]) -> Range<usize> {
    let blocks: &[i32] = bytemuck::cast_slice(blocks);
    let (used, known) = (blocks.len(), blocks.len().min(*filled));
    // Mostly a row is what it was, or grew at its end.
    let first = match row[..known] == blocks[..known] {
        true => known,
        false => row.iter().zip(blocks).position(|(a, b)| a != b).unwrap_or(known),
    };
    let end = used.max(*filled);
    row[first..used].copy_from_slice(&blocks[first..]);
    row[used..end].fill(0);
    *filled = used;
    first..end
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_attention::AttentionError;
    use headway_cpu::{CpuExec, CpuOptions};
    use headway_testkit::rng::Rng;

    #[test]
    fn a_row_that_grew_changed_at_its_end() {
        let (mut row, mut filled) = ([0; 6], 0);
        assert_eq!(write_row(&mut row, &mut filled, &[4, 5]), 0..2);
        assert_eq!(write_row(&mut row, &mut filled, &[4, 5]), 2..2);
        assert_eq!(write_row(&mut row, &mut filled, &[4, 5, 6]), 2..3);
        // A window's blocks are given back from the beginning.
        assert_eq!(write_row(&mut row, &mut filled, &[0, 5, 6, 7]), 0..4);
        assert_eq!(write_row(&mut row, &mut filled, &[0]), 1..4);
        assert_eq!((row, filled), ([0; 6], 1));
    }

    #[test]
    fn a_table_is_what_its_steps_say_whatever_came_before() {
        let cx = CpuExec::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        let mut table = BlockTable::new(&cx, 5, 9).unwrap();
        let mut rng = Rng::new(3);
        let mut requests: Vec<Vec<u32>> = vec![];
        for step in 0..300 {
            requests.iter_mut().filter(|r| r.len() < 9).for_each(|r| r.push(1 + rng.below(90) as u32));
            if rng.below(3) == 0 && requests.len() < 5 {
                requests.push((0..rng.below(9)).map(|_| rng.below(90) as u32).collect());
            }
            if rng.below(4) == 0 && !requests.is_empty() {
                requests.remove(rng.below(requests.len()));
            }
            let longest = requests.iter().map(Vec::len).max().unwrap_or(0);
            let (rows, stride) =
                (5.min(requests.len() + rng.below(3)), if step % 7 < 4 { 9 } else { longest });
            table.write(&cx, (rows, stride), requests.iter().map(|r| Ok(&r[..]))).unwrap();
            let mut expected = vec![0; rows * stride];
            for (i, r) in requests.iter().enumerate() {
                r.iter().enumerate().for_each(|(j, b)| expected[i * stride + j] = *b as i32);
            }
            assert_eq!(table.rows(rows).host(), expected, "step {step}");
        }
        assert_eq!(table.reallocs(), 0);
        let missing = || AttentionError::Inputs("no table".into());
        let broken = [Ok(&[7, 7][..]), Err(missing())].into_iter();
        assert!(table.write(&cx, (3, 9), broken).is_err());
        table.write(&cx, (3, 9), [Ok(&[7, 7][..])].into_iter()).unwrap();
        assert_eq!(table.rows(3).host()[..3], [7, 7, 0]);
        assert!(table.rows(3).host()[2..].iter().all(|b| *b == 0));
    }
}
