//! A step's attention as a list of tiles: which rows over which keys, in how many parts. Pure arithmetic on host
//! lengths, once a step; the kernel's blocks take the tiles one after another.

use bytemuck::{Pod, Zeroable};
use std::ops::Range;

/// Keys that lie in one block of the cache whatever its size: what ranges of keys are aligned to.
pub const RUN: usize = 16;
/// Rows of a tile that is bound by memory, usually.
pub const FEW_ROWS: usize = 16;
/// Tiles of few rows that a request may have before tiles of many rows are cheaper.
const FEW_TILES: usize = 2;
/// The least keys of a part.
const LEAST_PART: usize = 64;
/// The least keys of a part of a tile of many rows, whose parts are costly to merge.
const LEAST_PART_OF_MANY: usize = 512;
/// Keys whose sums are merged in their order where a row's bits must not depend on the batch.
pub const INVARIANT_CHUNK: usize = 512;
/// What a part costs beside its keys, in keys.
const BEGINNING: usize = 128;
/// Waves of parts that are weighed against each other, for tiles whose partial results are small.
pub const USUAL_WAVES: usize = 4;
/// Padding tokens of a tile.
const PADDING: usize = 64;

/// How a tile's rows are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Kind {
    /// A few, that all warps have: they divide the keys.
    FewRows = 0,
    /// The warps divide the rows and share the keys.
    ManyRows = 1,
    /// Padding tokens: zeros.
    NoRows = 2,
}

/// A tile as the kernel reads it; `csrc/attention/params.cuh` explains the fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Tile {
    /// Row of the block table; of the list's head: how many tiles follow.
    pub request: i32,
    /// First packed row; of padding the first token.
    pub row0: i32,
    /// Live rows; of padding tokens.
    pub rows: i32,
    /// First key.
    pub kv_begin: i32,
    /// One past the last key.
    pub kv_end: i32,
    /// [`Kind`].
    pub kind: i32,
    /// Which part of the tile's keys this is.
    pub split: i32,
    /// Parts.
    pub splits: i32,
    /// Row of the first part among the partial results.
    pub part_row0: i32,
    /// The tile's counter of parts that arrived.
    pub counter: i32,
    /// [`Causality`].
    pub causal: i32,
    /// Keys merged in their order; 0: all at once.
    pub chunk: i32,
}

/// A request of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// New tokens.
    pub q_len: usize,
    /// At least its tokens, new ones included.
    pub seq_len: usize,
    /// Whether rows see keys up to their own position alone.
    pub causal: Causality,
}

/// Whether rows see keys up to their own position alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Causality {
    /// They see all.
    No = 0,
    /// They do.
    Yes = 1,
    /// A flag on the device says so; planned as if they saw all.
    OnDevice = 2,
}

/// What the tiles are cut for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planner {
    /// Query heads of a key/value head.
    pub group: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Rows of a tile of few.
    pub few_rows: usize,
    /// Rows of a tile of many, where the kernel has such.
    pub many_rows: Option<usize>,
    /// Blocks that run at once on the device.
    pub slots: usize,
    /// Waves of parts that are weighed against each other, at most.
    pub waves: usize,
    /// Keys that a row sees, at most.
    pub window: Option<usize>,
    /// Whether a row's bits must not depend on what else is in the batch.
    pub batch_invariant: bool,
    /// Most tiles, the list's head not counted.
    pub max_tiles: usize,
    /// Rows of partial results that there is room for.
    pub max_part_rows: usize,
}

/// What a plan holds beside its tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Planned {
    /// Tiles, the list's head not counted.
    pub tiles: usize,
    /// Rows of partial results.
    pub part_rows: usize,
    /// Parts of tiles of more than one.
    pub parts: usize,
    /// Tiles of more than one part.
    pub counters: usize,
}

/// Rows and keys of a tile before it is divided.
struct Whole {
    request: usize,
    row0: usize,
    rows: usize,
    keys: Range<usize>,
    many: bool,
    causal: Causality,
}

impl Planner {
    /// Tiles and rows of partial results that steps of these limits can need.
    pub fn limits(&self, max_num_reqs: usize, max_num_tokens: usize) -> (usize, usize) {
        let rows = max_num_tokens * self.group;
        let whole = rows / self.few_rows + max_num_reqs.min(max_num_tokens) + max_num_tokens / PADDING + 1;
        // Parts are no shorter than the share of a block in the most waves; what has no room is not divided.
        let parts = self.most_parts();
        // Of many rows only those of one wave.
        let many = self.many_rows.map_or(0, |n| (2 * self.slots.div_ceil(self.kv_heads) + 1) * n);
        let rows = (parts * self.few_rows).max(many);
        (whole + parts, rows)
    }

    /// Parts beyond the first of their tiles.
    fn most_parts(&self) -> usize {
        2 * self.waves * self.slots.div_ceil(self.kv_heads) + 1
    }

    /// Writes a step's tiles into `list`, its head first; `padding` are the tokens past the last request.
    ///
    /// # Errors
    /// More tiles than there is room for.
    pub fn plan(
        &self,
        requests: impl Iterator<Item = Request> + Clone,
        padding: Range<usize>,
        list: &mut Vec<Tile>,
    ) -> Result<Planned, String> {
        let share = if self.batch_invariant { 0 } else { self.share(requests.clone()) };
        let mut planned = Planned::default();
        list.clear();
        list.push(Tile::default());
        for (i, r) in requests.enumerate() {
            self.whole_tiles(i, r, |w| self.divide(&w, share, list, &mut planned));
        }
        for first in padding.clone().step_by(PADDING) {
            let rows = PADDING.min(padding.end - first) as i32;
            let kind = Kind::NoRows as i32;
            list.push(Tile { row0: first as i32, rows, kind, splits: 1, ..Tile::default() });
        }
        planned.tiles = list.len() - 1;
        if planned.tiles > self.max_tiles {
            return Err(format!(
                "a step of {} attention tiles; the group was built for {}",
                planned.tiles, self.max_tiles
            ));
        }
        // The longest first: what is left for the end is short.
        list[1..].sort_unstable_by_key(|t| std::cmp::Reverse(cost(t)));
        list[0].request = planned.tiles as i32;
        Ok(planned)
    }

    /// Calls `each` with a request's tiles, undivided.
    fn whole_tiles(&self, request: usize, r: Request, mut each: impl FnMut(Whole)) {
        let all = r.q_len * self.group;
        let many = self.many_rows.filter(|_| !self.batch_invariant && all > FEW_TILES * self.few_rows);
        let (step, many) = (many.unwrap_or(self.few_rows), many.is_some());
        for row0 in (0..all).step_by(step) {
            let rows = step.min(all - row0);
            let keys = self.keys(&r, row0 / self.group..(row0 + rows - 1) / self.group + 1);
            each(Whole { request, row0, rows, keys, many, causal: r.causal });
        }
    }

    /// The keys that any of these new tokens sees, from a multiple of [`RUN`] on.
    fn keys(&self, r: &Request, tokens: Range<usize>) -> Range<usize> {
        // Positions count from `seq_len - q_len`, which is negative where a request asks with more rows than keys.
        let past = r.seq_len as i64 - r.q_len as i64;
        let end = if r.causal == Causality::Yes { past + tokens.end as i64 } else { r.seq_len as i64 };
        let end = usize::try_from(end).unwrap_or(0).min(r.seq_len);
        let begin = self.window.map_or(0, |w| past + tokens.start as i64 - w as i64 + 1);
        let begin = usize::try_from(begin).unwrap_or(0).min(end) / RUN * RUN;
        begin..end
    }

    /// Keys of a part of a tile of few rows: so many that the waves of blocks that run at once take the least time
    /// together. Where the tiles alone are many waves, a block's fair share.
    fn share(&self, requests: impl Iterator<Item = Request>) -> usize {
        // Keys of each tile, and whether it has many rows. In 32 bits, which divide faster.
        let mut tiles: Vec<(u32, bool)> = vec![];
        let (mut total, mut longest) = (0, 0);
        for r in requests {
            self.whole_tiles(0, r, |w| {
                let cost = w.keys.len() << usize::from(w.many);
                (total, longest) = (total + cost, longest.max(cost));
                tiles.push((w.keys.len() as u32, w.many));
            });
        }
        let mut best = (usize::MAX, (total * self.kv_heads).div_ceil(self.slots.max(1)).max(1));
        for waves in 1..=self.waves {
            let room = waves * self.slots / self.kv_heads;
            if tiles.len() > room {
                continue;
            }
            let parts = |share| {
                let part = [part_of(share, false) as u32, part_of(share, true) as u32];
                tiles.iter().map(|&(keys, many)| keys.div_ceil(part[usize::from(many)]).max(1) as usize).sum()
            };
            // Between a share that is too small and one that is not.
            let (mut low, mut high) = (total / room.max(1), longest.max(1));
            while high > low + LEAST_PART {
                let middle = low.midpoint(high);
                let parts: usize = parts(middle);
                if parts <= room { high = middle } else { low = middle }
            }
            let worst = tiles
                .iter()
                .map(|&(keys, many)| (keys as usize).min(part_of(high, many)) << usize::from(many));
            best = best.min((waves * (worst.max().unwrap_or(0) + BEGINNING), high));
        }
        best.1
    }

    /// One tile, or its parts.
    fn divide(&self, w: &Whole, share: usize, list: &mut Vec<Tile>, planned: &mut Planned) {
        let part = if self.batch_invariant { INVARIANT_CHUNK } else { part_of(share, w.many) };
        let kind = if w.many { Kind::ManyRows } else { Kind::FewRows };
        let (first, end) = (w.keys.start / part, w.keys.end.div_ceil(part));
        // Equal parts, where nothing fixes their ends.
        let each =
            w.keys.len().div_ceil(w.keys.len().div_ceil(part).max(1)).next_multiple_of(LEAST_PART).max(1);
        let mut splits = if self.batch_invariant { end - first } else { w.keys.len().div_ceil(each) };
        let room = planned.part_rows + splits * w.rows <= self.max_part_rows
            && planned.parts + splits <= self.most_parts();
        if !room {
            // No room: the same sums, in one block.
            splits = 1;
        }
        let splits = splits.max(1);
        let tile = Tile {
            request: w.request as i32,
            row0: w.row0 as i32,
            rows: w.rows as i32,
            kind: kind as i32,
            splits: splits as i32,
            part_row0: planned.part_rows as i32,
            counter: planned.counters as i32,
            causal: w.causal as i32,
            chunk: if self.batch_invariant { part as i32 } else { 0 },
            ..Tile::default()
        };
        for split in 0..splits {
            let keys = match (splits, self.batch_invariant) {
                (1, _) => w.keys.clone(),
                (_, true) => {
                    ((first + split) * part).max(w.keys.start)..((first + split + 1) * part).min(w.keys.end)
                }
                (_, false) => {
                    let from = w.keys.start + split * each;
                    from..(from + each).min(w.keys.end)
                }
            };
            list.push(Tile {
                kv_begin: keys.start as i32,
                kv_end: keys.end as i32,
                split: split as i32,
                ..tile
            });
        }
        if splits > 1 {
            planned.parts += splits;
            planned.part_rows += splits * w.rows;
            planned.counters += 1;
        }
    }
}

/// Keys of a part. With many rows a key costs about twice as much, and a short part is not worth a merge.
fn part_of(share: usize, many: bool) -> usize {
    match many {
        false => share.max(1).next_multiple_of(LEAST_PART),
        true => (share / 2).max(1).next_multiple_of(LEAST_PART).max(LEAST_PART_OF_MANY),
    }
}

/// What a tile takes, in keys of one of few rows.
fn cost(t: &Tile) -> i32 {
    (t.kv_end - t.kv_begin) << i32::from(t.kind == Kind::ManyRows as i32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_testkit::rng::Rng;

    fn planner(batch_invariant: bool, window: Option<usize>) -> Planner {
        let mut p = Planner {
            group: 4,
            kv_heads: 8,
            few_rows: FEW_ROWS,
            many_rows: Some(128),
            slots: 264,
            waves: USUAL_WAVES,
            window,
            batch_invariant,
            max_tiles: 0,
            max_part_rows: 0,
        };
        (p.max_tiles, p.max_part_rows) = p.limits(256, 8192);
        p
    }

    fn request(q_len: usize, seq_len: usize) -> Request {
        Request { q_len, seq_len, causal: Causality::Yes }
    }

    /// Every visible pair of row and key lies in one tile, parts follow one another, and there is room.
    fn check(p: &Planner, requests: &[Request]) -> Vec<Tile> {
        let mut list = vec![];
        let planned = p.plan(requests.iter().copied(), 5..5, &mut list).unwrap();
        assert!(planned.part_rows <= p.max_part_rows && planned.tiles + 1 == list.len());
        assert_eq!(list[0].request as usize, planned.tiles);
        for (i, r) in requests.iter().enumerate() {
            let past = r.seq_len as i64 - r.q_len as i64;
            for row in 0..r.q_len * p.group {
                let at = past + (row / p.group) as i64;
                let high = if r.causal == Causality::Yes {
                    (at + 1).clamp(0, r.seq_len as i64)
                } else {
                    r.seq_len as i64
                };
                let low = p.window.map_or(0, |w| (at - w as i64 + 1).max(0)).min(high);
                let holds =
                    |t: &&Tile| t.request == i as i32 && (t.row0..t.row0 + t.rows).contains(&(row as i32));
                let mut parts: Vec<_> = list[1..].iter().filter(holds).collect();
                parts.sort_by_key(|t| t.split);
                assert_eq!(parts.len(), parts[0].splits as usize);
                assert!(i64::from(parts[0].kv_begin) <= low && parts[0].kv_begin % RUN as i32 == 0);
                assert!(i64::from(parts[parts.len() - 1].kv_end) >= high);
                assert!(
                    parts.windows(2).all(|w| w[0].kv_end == w[1].kv_begin && w[1].kv_begin < w[1].kv_end)
                );
            }
        }
        list
    }

    #[test]
    fn every_row_meets_its_keys_once() {
        let mut rng = Rng::new(7);
        for round in 0..60 {
            let window = (round % 3 == 1).then(|| 1 + rng.below(300));
            let requests: Vec<_> = (0..1 + rng.below(12))
                .map(|_| {
                    let q_len = [0, 1, 1, 1, 4, 9, 40, 200][rng.below(8)];
                    Request {
                        q_len,
                        seq_len: q_len + rng.below(3000),
                        causal: [Causality::No, Causality::Yes, Causality::Yes, Causality::OnDevice]
                            [rng.below(4)],
                    }
                })
                .collect();
            check(&planner(round % 2 == 0, window), &requests);
        }
    }

    #[test]
    fn a_lone_long_decode_fills_the_device_and_a_full_batch_is_not_divided() {
        let p = planner(false, None);
        let one = check(&p, &[request(1, 32768)]);
        assert!((200..=264).contains(&((one.len() - 1) * p.kv_heads)), "{}", one.len());
        let many = check(&p, &vec![request(1, 8192); 128]);
        assert_eq!(many.len() - 1, 128);
        let mixed = check(&p, &[vec![request(1, 128); 63], vec![request(1, 32768)]].concat());
        assert!(mixed[1].kv_end - mixed[1].kv_begin <= 2048, "the longest is divided: {:?}", mixed[1]);
        let eight = check(&p, &[request(1, 32768); 8]);
        assert_eq!((eight.len() - 1) * p.kv_heads, 256, "all parts run at once");
        // 96 tiles would leave most blocks without work; two parts of each would leave a quarter.
        let small = Planner { group: 3, kv_heads: 3, ..p };
        let parts = (check(&small, &[request(1, 8192); 32]).len() - 1) * small.kv_heads;
        let waves = parts.div_ceil(small.slots);
        assert!(parts * 10 > waves * small.slots * 9, "{parts} parts in {waves} waves");
        let prefill = check(&p, &[request(1024, 1024)]);
        assert_eq!(prefill.len() - 1, 32, "no part is divided where that would not run at once");
    }

    #[test]
    fn parts_of_a_batch_invariant_plan_are_the_same_in_any_company() {
        let p = planner(true, None);
        let of = |list: Vec<Tile>, request: i32| {
            let mut t: Vec<_> = list[1..]
                .iter()
                .filter(|t| t.request == request)
                .map(|t| (t.kv_begin, t.kv_end, t.chunk))
                .collect();
            t.sort_unstable();
            t
        };
        let alone = of(check(&p, &[request(1, 3000)]), 0);
        let company = of(check(&p, &[request(100, 100), request(1, 3000), request(1, 77)]), 1);
        assert_eq!(alone, company);
        assert_eq!(alone.len(), 6);
        // What has no room for parts stays whole, and is computed in the same chunks.
        check(&p, &vec![request(1, 32768); 256]);
    }

    #[test]
    fn padding_is_zeroed_and_too_large_a_step_refused() {
        let p = planner(false, None);
        let mut list = vec![];
        p.plan([request(1, 10)].into_iter(), 1..200, &mut list).unwrap();
        let zeroed: i32 = list[1..].iter().filter(|t| t.kind == Kind::NoRows as i32).map(|t| t.rows).sum();
        assert_eq!(zeroed, 199);
        let small = Planner { max_tiles: 1, ..p };
        assert!(small.plan([request(1, 1), request(1, 1)].into_iter(), 0..0, &mut list).is_err());
    }
}
