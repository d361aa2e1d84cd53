//! Reading a block table, once a step: every number of it that a row can see.

/// The largest of some block numbers (0 where there are none), and all of them or-ed together, which is
/// negative where one is.
pub(super) fn largest_and_signs(row: &[i32]) -> (i32, i32) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2(row: &[i32]) -> (i32, i32) {
            by_eight(row)
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { avx2(row) };
        }
    }
    by_eight(row)
}

/// Vectors of eight, the last of which may overlap the one before: that changes neither answer.
#[inline(always)]
fn by_eight(row: &[i32]) -> (i32, i32) {
    let Some(last) = row.last_chunk::<8>() else {
        return row.iter().fold((0, 0), |(l, s), &b| (b.max(l), s | b));
    };
    let (mut largest, mut signs) = ([0; 8], [0; 8]);
    for eight in row.as_chunks::<8>().0.iter().chain([last]) {
        for i in 0..8 {
            largest[i] = eight[i].max(largest[i]);
            signs[i] |= eight[i];
        }
    }
    (largest.into_iter().fold(0, i32::max), signs.into_iter().fold(0, |a, b| a | b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_one_by_one_at_every_length_and_place() {
        for len in 0..40 {
            for at in 0..len {
                let mut row: Vec<i32> = (0..len as i32).collect();
                row[at] = 1000;
                assert_eq!(largest_and_signs(&row).0, 1000);
                assert!(largest_and_signs(&row).1 >= 0);
                row[at] = -1;
                assert!(largest_and_signs(&row).1 < 0, "{len} {at}");
                assert_eq!(largest_and_signs(&row), by_eight(&row));
            }
        }
        assert_eq!(largest_and_signs(&[]), (0, 0));
    }
}
