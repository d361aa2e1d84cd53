//! Chunks of scans, of convolutions and of cached context.

use crate::batches::starts;
use headway_attention::{
    ContextParallel, Result,
    group::arith::{
        context_chunks::{ChunkWorkspace, ContextChunks, request_of_token},
        conv_blocks::{ConvBlocks, NO_REQUEST},
        scan_chunks::ScanChunks,
    },
    step::context_parallel::local_seq_len,
};
use proptest::prelude::*;

/// The ends of a sequence's chunks, in its own tokens.
fn ends(chunks: &ScanChunks, sequence: usize, start: i32, query_start_loc: &[i32]) -> Vec<i32> {
    let of = |c: &usize| chunks.seq_idx[*c] == sequence as i32;
    let end = |c: usize| start + chunks.cu_chunk_seqlen[c + 1] - query_start_loc[sequence];
    (0..chunks.len()).filter(of).map(end).collect()
}

proptest! {
    #[test]
    fn scan_chunks_cover_each_token_once(
        lens in prop::collection::vec((0..600i32, 0..900i32, 0.0..1.0f64), 1..6), size in 1..300usize,
    ) {
        let checkpoints: Vec<i32> = lens.iter().map(|l| (f64::from(l.0) * l.2) as i32).collect();
        let q = starts(&lens.iter().map(|l| (l.0, l.1)).collect::<Vec<_>>());
        let mut c = ScanChunks::default();
        c.fill(lens.iter().map(|l| l.1), &q, size, Some(&checkpoints))?;
        prop_assert_eq!(c.cu_chunk_seqlen.len(), c.len() + 1);
        prop_assert_eq!(c.cu_chunk_seqlen.last(), q.last());
        for (s, &(new, old, _)) in lens.iter().enumerate() {
            let ends = ends(&c, s, old, &q);
            let mut before = old;
            for &end in &ends {
                prop_assert!(before < end && end - before <= size as i32);
                let aligned = end % size as i32 == 0;
                prop_assert!(aligned || end == old + new || end == old + checkpoints[s]);
                prop_assert_eq!(before / size as i32, (end - 1) / size as i32, "crosses a boundary");
                before = end;
            }
            prop_assert_eq!(before, old + new);
            let last = c.last_chunk_indices[s];
            let tokens = if last < 0 { 0 } else { c.cu_chunk_seqlen[last as usize + 1] };
            prop_assert_eq!(tokens, q[s + 1], "the last chunk ends where the sequence does");
            match c.checkpoint_chunk_indices[s] {
                -1 => prop_assert_eq!(checkpoints[s], 0),
                k => prop_assert_eq!(c.cu_chunk_seqlen[k as usize + 1] - q[s], checkpoints[s]),
            }
        }
    }

    /// A prefill in two pieces has the chunks of one in one piece, and one more end at the cut.
    #[test]
    fn scan_chunks_do_not_follow_the_step(len in 1..900i32, cut in 0.0..1.0f64, size in 1..300usize) {
        let cut = (f64::from(len) * cut) as i32;
        let [mut whole, mut first, mut second] = [(); 3].map(|()| ScanChunks::default());
        whole.fill([0], &[0, len], size, None)?;
        first.fill([0], &[0, cut], size, None)?;
        second.fill([cut], &[0, len - cut], size, None)?;
        let mut pieces = ends(&first, 0, 0, &[0]);
        pieces.extend(ends(&second, 0, cut, &[0]));
        let mut expected = ends(&whole, 0, 0, &[0]);
        expected.push(cut);
        expected.retain(|&e| e > 0);
        expected.sort_unstable();
        expected.dedup();
        prop_assert_eq!(pieces, expected);
    }

    #[test]
    fn conv_blocks_cover_each_token_once(
        lens in prop::collection::vec((0..90i32, Just(0)), 0..6), block in 1..20usize,
    ) {
        let mut c = ConvBlocks::default();
        c.fill(&starts(&lens), block);
        let mut tokens = vec![];
        for (&r, &b) in c.request.iter().zip(&c.block) {
            let first = b * block as i32;
            tokens.extend((first..lens[r as usize].0.min(first + block as i32)).map(|t| (r, t)));
        }
        let expected: Vec<_> =
            lens.iter().enumerate().flat_map(|(r, l)| (0..l.0).map(move |t| (r as i32, t))).collect();
        prop_assert_eq!(tokens, expected);
        let mut tables = [vec![7; c.table_len()], vec![7; c.table_len()]];
        let [request, number] = &mut tables;
        c.write(request, number)?;
        prop_assert_eq!(&tables[0][..c.len()], &c.request[..]);
        prop_assert_eq!(&tables[1][..c.len()], &c.block[..]);
        prop_assert!(tables.iter().all(|t| t[c.len()..].iter().all(|&x| x == NO_REQUEST)));
        prop_assert_eq!(c.write(&mut vec![0; c.len().saturating_sub(1)], &mut [0; 600]).is_err(), !c.is_empty());
    }

    #[test]
    fn context_chunks_gather_each_token_once_and_fit(
        lens in prop::collection::vec((1..20i32, prop_oneof![Just(0), 1..3000i32]), 0..9),
        page in prop_oneof![Just(1usize), Just(16), Just(48), Just(128)],
        pages in 1..12usize, spare in 0..5usize,
        size in 1..5usize, interleave in prop_oneof![Just(1usize), Just(4), Just(16)],
    ) {
        let cp = ContextParallel { size, rank: 0, interleave };
        let turn = if size > 1 { size * interleave } else { 1 };
        let tokens = pages * page * turn + spare;
        let workspace = ChunkWorkspace { tokens, alignment: page, context_parallel: cp };
        let q = starts(&lens);
        let mut c = ContextChunks::default();
        c.fill(lens.iter().map(|l| l.1), &q, &workspace)?;
        let mut done = vec![0; lens.len()];
        let mut local_done = vec![0; lens.len()];
        let mut next_request = 0;
        for chunk in &c.chunks {
            let (starts, n) = (c.starts(chunk), chunk.requests.len());
            prop_assert!(chunk.requests.start >= next_request, "out of order");
            next_request = chunk.requests.end - 1;
            prop_assert!(n > 0 && chunk.local_context_tokens <= workspace.local_tokens());
            prop_assert!(chunk.context_tokens <= tokens, "the ranks' shares exceed the workspace");
            prop_assert_eq!(chunk.context_tokens as i32, c.cu_lens(chunk)[n]);
            prop_assert_eq!(chunk.local_context_tokens as i32, c.local_cu_lens(chunk)[n]);
            prop_assert_eq!(chunk.is_continuation, starts[0] > 0);
            prop_assert!(starts[1..].iter().all(|&s| s == 0));
            prop_assert_eq!(chunk.first_request_end as i32, q[chunk.requests.start + 1]);
            prop_assert_eq!(chunk.tokens.start as i32..chunk.tokens.end as i32,
                q[chunk.requests.start]..q[chunk.requests.end]);
            prop_assert_eq!(request_of_token(c.lens(chunk)).count(), chunk.context_tokens);
            for (k, r) in chunk.requests.clone().enumerate() {
                let (start, len) = (starts[k], c.lens(chunk)[k]);
                prop_assert!(len > 0 && start == done[r] && (start as usize).is_multiple_of(page));
                prop_assert_eq!(c.local_starts(chunk)[k], local_done[r]);
                for rank in 0..size {
                    // Each rank's share begins where the plan says and fits what it gathers.
                    let local = |x| local_seq_len(x, ContextParallel { rank, ..cp });
                    prop_assert_eq!(local(start), local_done[r]);
                    prop_assert!(local(start + len) - local(start) <= c.local_lens(chunk)[k]);
                }
                done[r] += len;
                local_done[r] += c.local_lens(chunk)[k];
            }
            for (k, ranks) in c.rank_context_lens(chunk, cp).enumerate() {
                prop_assert_eq!(ranks.sum::<i32>(), lens[chunk.requests.start + k].1);
            }
        }
        prop_assert_eq!(done, lens.iter().map(|l| l.1).collect::<Vec<_>>());
        let bare: Vec<_> = lens.iter().enumerate().filter(|(_, l)| l.1 == 0).map(|(r, _)| r).collect();
        let bare: Vec<_> = bare.into_iter().map(|r| q[r] as usize..q[r + 1] as usize).collect();
        let some = lens.iter().any(|l| l.1 > 0);
        prop_assert_eq!(&c.without_context[..], if some { &bare[..] } else { &[] });
    }

    /// Where requests may be cut anywhere, there are no more chunks than the tokens ask for.
    #[test]
    fn context_chunks_waste_nothing(contexts in prop::collection::vec(1..500i32, 1..9), tokens in 1..700usize) {
        let workspace =
            ChunkWorkspace { tokens, alignment: 1, context_parallel: ContextParallel::default() };
        let q: Vec<i32> = (0..=contexts.len() as i32).collect();
        let mut c = ContextChunks::default();
        c.fill(contexts.iter().copied(), &q, &workspace)?;
        prop_assert_eq!(c.chunks.len(), (contexts.iter().sum::<i32>() as usize).div_ceil(tokens));
    }
}

#[test]
fn what_cannot_be_cut_is_refused() -> Result<()> {
    let workspace =
        |tokens| ChunkWorkspace { tokens, alignment: 64, context_parallel: ContextParallel::default() };
    let mut c = ContextChunks::default();
    let refused = c.fill([100], &[0, 1], &workspace(63)).unwrap_err().to_string();
    assert!(refused.contains("63 tokens") && refused.contains("--block-size"), "{refused}");
    c.fill([100], &[0, 1], &workspace(64))?;
    assert_eq!(c.chunks.len(), 2);
    // Nothing to gather needs no room.
    c.fill([0, 0], &[0, 1, 2], &workspace(0))?;
    assert!(c.chunks.is_empty());
    assert!(c.fill([5, 5], &[0, 1], &workspace(64)).is_err());

    let mut s = ScanChunks::default();
    assert!(s.fill([0], &[0, 4], 0, None).is_err());
    assert!(s.fill([], &[0, 4], 8, None).is_err());
    let past = s.fill([0], &[0, 4], 8, Some(&[5])).unwrap_err().to_string();
    assert!(past.contains("token 5 of a sequence with 4"), "{past}");
    Ok(())
}
