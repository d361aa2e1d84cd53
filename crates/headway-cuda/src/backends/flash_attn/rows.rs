//! The bounds of a step's requests, as a launch takes them.

use headway_attention::StepInputs;

/// New tokens of each request where all that have some have as many, the requests without come last, and so many rows are
/// what all would have.
pub(super) fn uniform_len(x: &StepInputs) -> Option<usize> {
    let lens = x.query_start_loc.host().windows(2).map(|w| (w[1] - w[0]) as usize);
    let first = lens.clone().next().filter(|&n| n > 0)?;
    let alike = lens.clone().all(|n| n == first || n == 0);
    let ordered = lens.clone().skip_while(|&n| n > 0).all(|n| n == 0);
    (alike && ordered && x.num_actual_tokens == x.num_reqs * first).then_some(first)
}

/// The requests' bounds, where each request without tokens or keys behind the others takes a row of padding, as long as
/// there is some: its result are zeros.
pub(super) fn with_padding(x: &StepInputs) -> Vec<i32> {
    let host = x.query_start_loc.host();
    let live = host.last().copied().unwrap_or(0);
    let mut spare = x.num_actual_tokens as i32 - live;
    let mut bounds = vec![0; host.len()];
    for i in 1..host.len() {
        let takes = spare > 0 && host[i - 1] == live && x.seq_lens_upper_bound[i - 1] == 0;
        bounds[i] = bounds[i - 1] + host[i] - host[i - 1] + i32::from(takes);
        spare -= i32::from(takes);
    }
    bounds
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_tensor::{Dual, View};

    fn inputs(lens: &[i32], padded: usize) -> StepInputs {
        let mut starts = vec![0];
        lens.iter().for_each(|n| starts.push(starts.last().unwrap() + n));
        let all = vec![9; lens.len()];
        let mut x = StepInputs::new(Dual::from_vec(starts), View::from_vec(all.clone()), all).unwrap();
        x.num_actual_tokens = padded;
        x
    }

    #[test]
    fn batches_of_one_length_are_told_from_others() {
        let len = |lens: &[i32], padded| uniform_len(&inputs(lens, padded));
        assert_eq!(len(&[1, 1, 1], 3), Some(1));
        assert_eq!(len(&[1, 0, 0], 3), Some(1));
        assert_eq!(len(&[3, 3, 0], 9), Some(3));
        assert_eq!(len(&[1, 1, 0], 2), None);
        assert_eq!(len(&[1, 0, 1], 3), None);
        assert_eq!(len(&[1, 2], 3), None);
        assert_eq!(len(&[0, 0], 2), None);
    }

    #[test]
    fn requests_without_tokens_take_the_padding() {
        let bounds = |lens: &[i32], held: &[i32], tokens| {
            let mut x = inputs(lens, tokens);
            x.seq_lens_upper_bound = held.to_vec();
            with_padding(&x)
        };
        assert_eq!(bounds(&[3, 1, 0, 0, 0, 0], &[3, 9, 0, 0, 0, 0], 6), [0, 3, 4, 5, 6, 6, 6]);
        assert_eq!(bounds(&[1, 1, 1], &[4, 4, 4], 3), [0, 1, 2, 3]);
        // One that others follow, or that has keys, takes none.
        assert_eq!(bounds(&[1, 0, 1, 0], &[4, 0, 4, 7], 4), [0, 1, 1, 2, 2]);
        assert_eq!(bounds(&[2, 2], &[4, 4], 7), [0, 2, 4]);
    }
}
