//! Page lists, state blocks, draft masks.

use crate::batches::{batch, common};
use headway_attention::{
    Result,
    group::{
        arith::{flashinfer::draft_mask, mamba_states::state_blocks, pages::PageLists},
        kv::{
            block_table::{BlockRows, slot},
            spec::MambaCacheMode,
        },
    },
};
use proptest::prelude::*;

proptest! {
    #[test]
    fn page_lists_reproduce_the_block_table((lens, prefilling) in batch(3), page in 1..70usize) {
        let common = common(&lens, prefilling, page);
        let table = BlockRows {
            blocks: common.block_table.host(), stride: common.block_table_stride, block_size: page,
        };
        let seq_lens = common.inputs.seq_lens.host().unwrap_or(&[]);
        let mut lists = PageLists::default();
        lists.fill(seq_lens, table)?;
        prop_assert_eq!(lists.indptr.last().map(|&p| p as usize), Some(lists.indices.len()));
        for (r, &len) in seq_lens.iter().enumerate() {
            let pages = lists.of(r);
            for position in 0..len as usize {
                let ours = i64::from(pages[position / page]) * page as i64 + (position % page) as i64;
                prop_assert_eq!(Some(ours), slot(common.blocks_of(r), page, position));
            }
            let full = pages.len().saturating_sub(1) as i32 * page as i32;
            prop_assert_eq!(full + lists.last_page_len[r], len);
            prop_assert_eq!(lists.bounds(r..r + 1), &lists.indptr[r..r + 2]);
        }
    }

    #[test]
    fn a_state_is_in_the_block_of_the_last_token(
        (lens, prefilling) in batch(3), block in 8..70usize, drafts in 0..3usize, all in any::<bool>(),
    ) {
        let common = common(&lens, prefilling, block);
        let table = BlockRows {
            blocks: common.block_table.host(), stride: common.block_table_stride, block_size: block,
        };
        let seq_lens = common.inputs.seq_lens.host().unwrap_or(&[]);
        let mode = if all { MambaCacheMode::All } else { MambaCacheMode::Align };
        let mut states = vec![];
        let width = state_blocks(table, seq_lens, mode, drafts, &mut states)?;
        prop_assert_eq!((width, states.len()), (1 + drafts, lens.len() * (1 + drafts)));
        for (r, (&len, blocks)) in seq_lens.iter().zip(states.chunks(width)).enumerate() {
            let row = common.blocks_of(r);
            let last = (len - 1).max(0) as usize;
            prop_assert_eq!(slot(row, block, last).map(|s| s / block as i64), Some(i64::from(blocks[0])));
            prop_assert!(row.windows(width).any(|w| w == blocks), "the drafts' blocks follow");
        }
    }

    #[test]
    fn a_draft_sees_itself_and_what_came_before(lens in prop::collection::vec(0..70i32, 0..6), causal in any::<bool>()) {
        let mut q = vec![0];
        lens.iter().for_each(|l| q.push(q[q.len() - 1] + l));
        let most = lens.iter().copied().max().unwrap_or(0) as usize;
        let words = 2 * most.div_ceil(32);
        let mut mask = vec![];
        draft_mask(&q, words, causal, &mut mask);
        prop_assert_eq!(mask.len(), q[q.len() - 1] as usize * words);
        for (r, &len) in lens.iter().enumerate() {
            for token in 0..len {
                let row = &mask[(q[r] + token) as usize * words..][..words];
                for other in 0..16 * words as i32 {
                    let sees = row[other as usize / 16] >> (other % 16) & 1 == 1;
                    prop_assert_eq!(sees, other < len && (!causal || other <= token));
                }
            }
        }
    }
}

#[test]
fn a_table_too_narrow_is_refused() -> Result<()> {
    let table = BlockRows { blocks: &[3, 4, 5, 6], stride: 2, block_size: 16 };
    let mut lists = PageLists::default();
    lists.fill(&[32, 0], table)?;
    assert_eq!((lists.of(0), lists.of(1), lists.of(2)), (&[3, 4][..], &[][..], &[][..]));
    let refused = lists.fill(&[16, 33], table).unwrap_err().to_string();
    assert!(refused.contains("request 1 of 33 tokens needs 3 pages"), "{refused}");
    assert!(lists.fill(&[1, 1, 1], table).is_err());
    assert!(lists.fill(&[1], BlockRows { block_size: 0, ..table }).is_err());

    let mut states = vec![];
    assert_eq!(state_blocks(table, &[17, 16], MambaCacheMode::All, 0, &mut states)?, 1);
    assert_eq!(states, [4, 5]);
    let refused = state_blocks(table, &[17], MambaCacheMode::Align, 1, &mut states).unwrap_err().to_string();
    assert!(refused.contains("blocks 1 to 2"), "{refused}");
    Ok(())
}
