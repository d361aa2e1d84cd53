//! The choices of a step's tokens sorted by expert: which rows each expert computes, and where a token finds its
//! results. Written into buffers that are kept.

use super::route::Choice;

/// A sorted order of (token, rank) pairs; a *slot* is a place in it.
pub(super) struct Sorted {
    /// Slots of expert e: `offsets[e]..offsets[e + 1]`.
    pub offsets: Vec<u32>,
    /// Token of each slot.
    pub tokens: Vec<u32>,
    /// Slot of a token's choice: `[token * top_k + rank]`.
    pub slots: Vec<u32>,
}

impl Sorted {
    /// Room for `slots` choices of `experts` experts.
    pub(super) fn with_room(experts: usize, slots: usize) -> Self {
        Self {
            offsets: Vec::with_capacity(experts + 1),
            tokens: Vec::with_capacity(slots),
            slots: Vec::with_capacity(slots),
        }
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        (self.offsets.capacity() + self.tokens.capacity() + self.slots.capacity()) * size_of::<u32>()
    }

    /// Sorts the choices, `top_k` a token; tokens of one expert stay in their order.
    pub(super) fn fill(&mut self, choices: &[Choice], experts: usize, top_k: usize) {
        let n = choices.len();
        self.offsets.clear();
        self.offsets.resize(experts + 1, 0);
        self.tokens.resize(n, 0);
        self.slots.resize(n, 0);
        for c in choices {
            self.offsets[c.expert as usize + 1] += 1;
        }
        for e in 0..experts {
            self.offsets[e + 1] += self.offsets[e];
        }
        // Each offset walks through its expert's slots, and so ends where the next one began.
        for (i, c) in choices.iter().enumerate() {
            let next = &mut self.offsets[c.expert as usize];
            self.tokens[*next as usize] = (i / top_k) as u32;
            self.slots[i] = *next;
            *next += 1;
        }
        self.offsets.copy_within(..experts, 1);
        self.offsets[0] = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_choice_has_one_slot_in_its_experts_run(
            experts in 1usize..9,
            picks in proptest::collection::vec(0u32..1000, 0..60),
            top_k in 1usize..4,
        ) {
            let n = picks.len() / top_k * top_k;
            let choices: Vec<Choice> =
                picks[..n].iter().map(|p| Choice { expert: p % experts as u32, weight: 0.0 }).collect();
            let mut sorted = Sorted::with_room(experts, 64);
            let room = sorted.bytes();
            for _ in 0..2 {
                sorted.fill(&choices, experts, top_k);
                let mut seen = vec![false; n];
                for (i, c) in choices.iter().enumerate() {
                    let slot = sorted.slots[i];
                    let e = c.expert as usize;
                    prop_assert!(sorted.offsets[e] <= slot && slot < sorted.offsets[e + 1]);
                    prop_assert_eq!(sorted.tokens[slot as usize] as usize, i / top_k);
                    prop_assert!(!std::mem::replace(&mut seen[slot as usize], true));
                }
                prop_assert_eq!((sorted.offsets[0], sorted.offsets[experts] as usize), (0, n));
                for run in sorted.offsets.windows(2) {
                    let tokens = &sorted.tokens[run[0] as usize..run[1] as usize];
                    prop_assert!(tokens.is_sorted());
                }
            }
            prop_assert_eq!(sorted.bytes(), room, "nothing is allocated");
        }
    }
}
