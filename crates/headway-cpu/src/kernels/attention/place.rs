//! Where tiles of keys and values lie, and what to ask for while one is read.

use super::{
    elem::Elem,
    job::{Job, Work},
    micro::{GROUP, GROUPS},
    tile::Block,
};

/// Bytes between what is read and what is asked for: more than memory needs to answer, and little enough
/// that both stay in the nearest cache. A line that was asked for and pushed out again costs twice: it comes
/// from the next cache by the same few buffers that wait for memory.
const DISTANCE: usize = 8 << 10;

/// Groups of keys or values within [`DISTANCE`], 1 to [`GROUPS`].
pub(super) fn groups_ahead<E: Elem>(head_size: usize) -> usize {
    (DISTANCE / (GROUP * head_size * E::SIZE)).clamp(1, GROUPS)
}

/// Where a tile's groups of keys and values lie; groups that no row sees are null.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) keys: [*const u8; GROUPS],
    pub(super) values: [*const u8; GROUPS],
}

impl Place {
    /// No tile.
    pub(super) const NONE: Self =
        Self { keys: [std::ptr::null(); GROUPS], values: [std::ptr::null(); GROUPS] };

    /// The keys and values of a block, of a key/value head.
    ///
    /// # Safety
    /// `job` holds what its fields say; the keys lie below the request's length.
    pub(super) unsafe fn of<E: Elem>(job: &Job<'_>, work: &Work<'_>, kv_head: usize, of: &Block) -> Self {
        let (shape, cache, mut place) = (&job.shape, &job.cache, Self::NONE);
        for g in of.groups() {
            let token = of.at + g * GROUP;
            let (block, offset) = (token / cache.block_size, token % cache.block_size);
            // SAFETY: `Batch` checked that the table has a place for this block. The number is below the
            // cache's blocks, or 0, which every cache has.
            unsafe {
                let mut number = *work.blocks.get_unchecked(block) as u32 as usize;
                if number >= cache.num_blocks {
                    job.bad_block.note(work.item.request, number as u32 as i32);
                    number = 0;
                }
                let head = cache.base.add(number * cache.block_stride + kv_head * cache.head_bytes);
                place.keys[g] = head.add(offset * shape.head_size * E::SIZE);
                place.values[g] = head.add(cache.values + offset * shape.head_size_v * E::SIZE);
            }
        }
        place
    }

    fn is_whole(&self) -> bool {
        !self.keys[0].is_null() && !self.keys[GROUPS - 1].is_null()
    }

    /// For each group, the one that is read `distance` groups later, where keys are read before values and
    /// this tile before `next`. Where nothing follows, the group itself.
    pub(super) fn ahead(&self, next: &Self, distance: usize) -> Self {
        let all = [self.keys, self.values, next.keys, next.values];
        // Whole tiles, nearly always: the groups are in order already.
        if let Some(order) = all.as_flattened().get(distance..distance + 2 * GROUPS)
            && self.is_whole()
            && next.is_whole()
        {
            let (mut keys, mut values) = (self.keys, self.values);
            keys.copy_from_slice(&order[..GROUPS]);
            values.copy_from_slice(&order[GROUPS..]);
            return Self { keys, values };
        }
        let (mut order, mut n) = ([std::ptr::null(); 4 * GROUPS], 0);
        for group in all.into_iter().flatten().filter(|g| !g.is_null()) {
            order[n] = group;
            n += 1;
        }
        let (mut ahead, mut at) = (*self, distance);
        for group in ahead.keys.iter_mut().chain(&mut ahead.values).filter(|g| !g.is_null()) {
            if at < n {
                *group = order[at];
            }
            at += 1;
        }
        ahead
    }

    /// For each group, the same one of `next`; where that has none, the group itself.
    pub(super) fn or_itself(&self, next: &Self) -> Self {
        let pick = |a: [*const u8; GROUPS], b: [*const u8; GROUPS]| {
            std::array::from_fn(|g| if a[g].is_null() { b[g] } else { a[g] })
        };
        Self { keys: pick(next.keys, self.keys), values: pick(next.values, self.values) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ahead_skips_missing_groups_and_ends_with_itself() {
        let p = |n: usize| std::ptr::without_provenance::<u8>(n);
        let now = Place { keys: [p(0), p(1), p(2), p(0)], values: [p(0), p(11), p(12), p(0)] };
        let next = Place { keys: [p(21), p(0), p(0), p(0)], values: [p(31), p(0), p(0), p(0)] };
        let one = now.ahead(&next, 1);
        assert_eq!((one.keys, one.values), ([p(0), p(2), p(11), p(0)], [p(0), p(12), p(21), p(0)]));
        let four = now.ahead(&next, 4);
        assert_eq!((four.keys, four.values), ([p(0), p(21), p(31), p(0)], now.values));
        let last = now.ahead(&Place::NONE, 2);
        assert_eq!((last.keys, last.values), ([p(0), p(11), p(12), p(0)], now.values));
        assert_eq!(now.or_itself(&next).keys, [p(21), p(1), p(2), p(0)]);
        let whole =
            |n: usize| Place { keys: [1, 2, 3, 4].map(|i| p(n + i)), values: [5, 6, 7, 8].map(|i| p(n + i)) };
        for distance in 1..=4 {
            let ahead = whole(0).ahead(&whole(8), distance);
            assert!(ahead.keys.iter().chain(&ahead.values).map(|p| p.addr()).eq(1 + distance..9 + distance));
        }
    }
}
