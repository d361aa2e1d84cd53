//! Named cases: block borders, whole-prompt hits, recycled pages, pressure, windows, wrong calls.

use crate::kv::{
    Admission, BlockHash, BlockHashes, CachedPrefix, KvCacheManager, KvError, KvGroupPolicy, RequestId,
};

fn manager(blocks: usize, groups: Vec<KvGroupPolicy>) -> KvCacheManager {
    KvCacheManager::new(blocks, groups, true).expect("a valid configuration")
}

/// Runs `tokens` through the cache in one step and returns how many were found in it; `None` when it did not fit.
fn run(kv: &mut KvCacheManager, id: u64, tokens: &[u32]) -> Option<usize> {
    let mut hashes = BlockHashes::default();
    let prefix = kv.lookup(&mut hashes, tokens);
    let found = prefix.num_tokens();
    if !kv.admit(RequestId(id), prefix, tokens.len() - found, Admission::New).expect("a new request") {
        return None;
    }
    kv.advance(RequestId(id), &mut hashes, tokens, tokens.len()).expect("it has pages");
    Some(found)
}

fn tokens(start: u32, len: u32) -> Vec<u32> {
    (start..start + len).collect()
}

#[test]
fn exact_multiples_fill_their_last_block() {
    for (len, blocks) in [(4, 1), (8, 2), (12, 3), (13, 4)] {
        let mut kv = manager(16, vec![KvGroupPolicy::full(4)]);
        assert_eq!(run(&mut kv, 0, &tokens(0, len)), Some(0));
        assert_eq!(kv.block_table(RequestId(0), 0).map(<[u32]>::len), Some(blocks));
        assert_eq!(kv.usage().used_pages, blocks);
    }
}

#[test]
fn a_prompt_wholly_cached_still_computes_its_last_block() {
    let mut kv = manager(16, vec![KvGroupPolicy::full(16)]);
    let prompt = tokens(0, 32);
    assert_eq!(run(&mut kv, 0, &prompt), Some(0));
    assert_eq!(run(&mut kv, 1, &prompt), Some(16));
    let (a, b) = (kv.block_table(RequestId(0), 0).unwrap(), kv.block_table(RequestId(1), 0).unwrap());
    assert_eq!(a[0], b[0], "the first block is shared");
    assert_ne!(a[1], b[1], "the block that is computed again has a page of its own");
    assert_eq!(run(&mut kv, 2, &tokens(0, 33)), Some(32));
    assert_eq!(kv.stats().hit_tokens, 48);
    assert_eq!(kv.stats().queried_tokens, 32 + 32 + 33);
}

#[test]
fn a_recycled_page_is_not_found_by_its_old_content() {
    let mut kv = manager(4, vec![KvGroupPolicy::full(4)]);
    let (old, new) = (tokens(0, 12), tokens(100, 12));
    assert_eq!(run(&mut kv, 0, &old), Some(0));
    kv.free(RequestId(0));
    assert_eq!(kv.usage().cached_free_pages, 3);
    assert_eq!(run(&mut kv, 1, &new), Some(0), "cached pages give way");
    assert_eq!(kv.stats().evicted_blocks, 3);
    kv.free(RequestId(1));
    assert_eq!(kv.lookup(&mut BlockHashes::default(), &old).num_tokens(), 0);
    assert_eq!(kv.lookup(&mut BlockHashes::default(), &new).num_tokens(), 8);
}

#[test]
fn the_end_of_a_prefix_is_dropped_before_its_start() {
    let mut kv = manager(6, vec![KvGroupPolicy::full(4)]);
    run(&mut kv, 0, &tokens(0, 20));
    kv.free(RequestId(0));
    run(&mut kv, 1, &tokens(100, 4));
    assert_eq!(kv.lookup(&mut BlockHashes::default(), &tokens(0, 20)).num_tokens(), 16);
    run(&mut kv, 2, &tokens(200, 8));
    assert_eq!(kv.lookup(&mut BlockHashes::default(), &tokens(0, 20)).num_tokens(), 8);
}

#[test]
fn pages_without_a_hash_are_reused_before_cached_ones() {
    let mut kv = manager(6, vec![KvGroupPolicy::full(4)]);
    run(&mut kv, 0, &tokens(0, 8));
    run(&mut kv, 1, &tokens(50, 3));
    kv.free(RequestId(0));
    kv.free(RequestId(1));
    run(&mut kv, 2, &tokens(100, 12));
    assert_eq!(kv.stats().evicted_blocks, 0);
    assert_eq!(kv.lookup(&mut BlockHashes::default(), &tokens(0, 9)).num_tokens(), 8);
}

#[test]
fn only_whole_blocks_are_shared_and_only_with_all_before_them() {
    let mut kv = manager(32, vec![KvGroupPolicy::full(4)]);
    run(&mut kv, 0, &tokens(0, 12));
    let mut other = tokens(0, 12);
    other[5] = 99;
    assert_eq!(kv.lookup(&mut BlockHashes::default(), &other).num_tokens(), 4);
    other = tokens(0, 12);
    other[0] = 99;
    assert_eq!(kv.lookup(&mut BlockHashes::default(), &other).num_tokens(), 0);
}

#[test]
fn a_block_is_findable_only_once_it_is_full() {
    let mut kv = manager(16, vec![KvGroupPolicy::full(8)]);
    let (prompt, mut hashes) = (tokens(0, 12), BlockHashes::default());
    let prefix = kv.lookup(&mut hashes, &prompt);
    assert!(kv.admit(RequestId(0), prefix, 7, Admission::New).unwrap());
    kv.advance(RequestId(0), &mut hashes, &prompt, 7).unwrap();
    assert_eq!(kv.lookup(&mut BlockHashes::default(), &prompt).num_tokens(), 0);
    assert!(kv.allocate(RequestId(0), 7, 5).unwrap());
    kv.advance(RequestId(0), &mut hashes, &prompt, 12).unwrap();
    assert_eq!(kv.lookup(&mut BlockHashes::default(), &prompt).num_tokens(), 8);
}

#[test]
fn a_window_gives_pages_back_and_needs_only_its_own_blocks() {
    let mut kv = manager(64, vec![KvGroupPolicy::full(4), KvGroupPolicy::sliding_window(4, 6)]);
    let (prompt, mut hashes) = (tokens(0, 25), BlockHashes::default());
    assert!(kv.admit(RequestId(0), CachedPrefix::none(), 20, Admission::New).unwrap());
    kv.advance(RequestId(0), &mut hashes, &prompt, 20).unwrap();
    assert!(kv.allocate(RequestId(0), 20, 5).unwrap());
    // Position 20 reads 15..=20, so blocks 0 to 2 of the window group are gone.
    let table = kv.block_table(RequestId(0), 1).unwrap();
    assert_eq!(
        table.iter().map(|b| *b == 0).collect::<Vec<_>>(),
        [true, true, true, false, false, false, false]
    );
    assert!(kv.block_table(RequestId(0), 0).unwrap().iter().all(|b| *b != 0));
    assert_eq!(kv.usage().used_pages, 7 + 4);
    kv.advance(RequestId(0), &mut hashes, &prompt, 25).unwrap();
    kv.free(RequestId(0));
    let prefix = kv.lookup(&mut hashes, &prompt);
    assert_eq!(prefix.num_tokens(), 24);
    // The first new token, 24, reads 19..: blocks 4 and 5 of the window group, all 6 of the full one.
    assert_eq!(kv.pages_to_admit(&prefix, 24, 64), 6 + 2);
}

#[test]
fn a_window_group_that_lost_a_block_shortens_the_prefix() {
    let mut kv = manager(15, vec![KvGroupPolicy::full(4), KvGroupPolicy::sliding_window(4, 6)]);
    let prompt = tokens(0, 24);
    run(&mut kv, 0, &prompt);
    kv.free(RequestId(0));
    // 14 pages, 12 of them cached: four fresh ones cost both groups their last block.
    assert!(kv.admit(RequestId(1), CachedPrefix::none(), 8, Admission::New).unwrap());
    assert_eq!(kv.lookup(&mut BlockHashes::default(), &tokens(0, 40)).num_tokens(), 20);
}

#[test]
fn prefixes_end_on_a_border_of_every_group() {
    let mut kv = manager(64, vec![KvGroupPolicy::full(4), KvGroupPolicy::full(6)]);
    assert_eq!(kv.prefix_granularity_tokens(), 12);
    run(&mut kv, 0, &tokens(0, 40));
    assert_eq!(kv.lookup(&mut BlockHashes::default(), &tokens(0, 40)).num_tokens(), 36);
    assert_eq!(kv.lookup(&mut BlockHashes::default(), &tokens(0, 36)).num_tokens(), 24);
}

#[test]
fn windowed_layers_do_not_cost_full_length() {
    let mut groups = vec![KvGroupPolicy::sliding_window(16, 16); 5];
    groups.push(KvGroupPolicy::full(16));
    let kv = manager(101, groups);
    // At most 16 + 15 tokens of a window are alive: 3 pages each; the other 85 pages are the full group's.
    assert_eq!(kv.max_request_tokens(16), 85 * 16);
    assert_eq!(manager(101, vec![KvGroupPolicy::full(16); 6]).max_request_tokens(16), 16 * 16);
    assert_eq!(manager(4, vec![KvGroupPolicy::sliding_window(16, 16)]).max_request_tokens(16), usize::MAX);
}

#[test]
fn resuming_is_no_hit() {
    let mut kv = manager(16, vec![KvGroupPolicy::full(4)]);
    let prompt = tokens(0, 12);
    run(&mut kv, 0, &prompt);
    kv.free(RequestId(0));
    let prefix = kv.lookup(&mut BlockHashes::default(), &prompt);
    assert!(kv.admit(RequestId(0), prefix, 4, Admission::Resumed).unwrap());
    let stats = kv.stats();
    assert_eq!((stats.requests, stats.hit_tokens, stats.hit_rate()), (1, 0, 0.0));
    assert_eq!((stats.resumed_requests, stats.resumed_hit_tokens), (1, 8));
}

#[test]
fn no_room_changes_nothing() {
    let mut kv = manager(5, vec![KvGroupPolicy::full(4)]);
    run(&mut kv, 0, &tokens(0, 12));
    let before = (kv.usage(), kv.stats());
    assert!(!kv.admit(RequestId(1), CachedPrefix::none(), 8, Admission::New).unwrap());
    assert_eq!(kv.block_table(RequestId(1), 0), None);
    assert!(!kv.allocate(RequestId(0), 12, 5).unwrap());
    assert_eq!((kv.usage(), kv.stats()), before);
}

#[test]
fn wrong_calls_are_errors() {
    let mut kv = manager(8, vec![KvGroupPolicy::full(4)]);
    let (id, prompt, mut hashes) = (RequestId(0), tokens(0, 8), BlockHashes::default());
    assert_eq!(kv.allocate(id, 0, 1), Err(KvError::UnknownRequest(id)));
    run(&mut kv, 0, &prompt);
    assert_eq!(kv.admit(id, CachedPrefix::none(), 1, Admission::New), Err(KvError::AlreadyAdmitted(id)));
    assert!(matches!(kv.allocate(id, 7, 1), Err(KvError::Backwards { had: 8, asked: 7, .. })));
    assert!(matches!(kv.allocate(id, 9, 1), Err(KvError::BeyondPages { claimed: 9, .. })));
    assert!(matches!(
        kv.advance(id, &mut hashes, &prompt, 9),
        Err(KvError::BeyondPages { claimed: 9, have: 8, .. })
    ));
    let prefix = kv.lookup(&mut hashes, &prompt);
    kv.reset_prefix_cache();
    assert_eq!(
        kv.admit(RequestId(1), prefix, 4, Admission::New),
        Err(KvError::StalePrefix { request: RequestId(1), num_tokens: 4 })
    );
    assert!(kv.free(id));
    assert!(!kv.free(id));
}

#[test]
fn a_state_is_one_page_whatever_the_length() {
    let groups = vec![KvGroupPolicy::full(4), KvGroupPolicy::state()];
    let mut kv = KvCacheManager::new(16, groups.clone(), false).expect("a valid configuration");
    let (id, mut hashes) = (RequestId(0), BlockHashes::default());
    assert_eq!(kv.admit(id, CachedPrefix::none(), 9, Admission::New), Ok(true));
    let first = kv.block_table(id, 1).expect("admitted").to_vec();
    assert_eq!((first.len(), kv.usage().used_pages), (1, 4));
    kv.advance(id, &mut hashes, &tokens(0, 40), 9).expect("it has pages");
    assert_eq!(kv.allocate(id, 9, 31), Ok(true));
    kv.advance(id, &mut hashes, &tokens(0, 40), 40).expect("it has pages");
    assert_eq!(kv.block_table(id, 1), Some(&first[..]), "the state stays where it is");
    assert_eq!((kv.usage().used_pages, kv.peak_pages(40, 8)), (11, 11));
    assert_eq!(kv.max_request_tokens(8), 14 * 4);
    assert!(kv.free(id));
    assert_eq!(kv.usage().used_pages, 0);
    // Nothing but states: no length is too much.
    let states = KvCacheManager::new(3, vec![KvGroupPolicy::state(); 2], false).expect("valid");
    assert_eq!(states.max_request_tokens(8), usize::MAX);
    assert!(matches!(KvCacheManager::new(16, groups, true), Err(KvError::PrefixCachingBesideState)));
}

#[test]
fn configurations_without_sense_are_refused() {
    let refused = |blocks, groups| KvCacheManager::new(blocks, groups, true).map(|_| ()).unwrap_err();
    assert_eq!(refused(1, vec![KvGroupPolicy::full(4)]), KvError::PoolTooSmall { num_blocks: 1 });
    assert!(matches!(refused(usize::MAX, vec![KvGroupPolicy::full(4)]), KvError::PoolTooLarge { .. }));
    assert_eq!(refused(8, Vec::new()), KvError::NoGroups);
    assert_eq!(
        refused(8, vec![KvGroupPolicy::full(0)]),
        KvError::ZeroPolicy { group: 0, what: "block_size" }
    );
    let zero_window = vec![KvGroupPolicy::full(4), KvGroupPolicy::sliding_window(4, 0)];
    assert_eq!(refused(8, zero_window), KvError::ZeroPolicy { group: 1, what: "window" });
    let huge = vec![KvGroupPolicy::full(usize::MAX), KvGroupPolicy::full(usize::MAX - 1)];
    assert!(matches!(refused(8, huge), KvError::BlockSizesIncommensurable { .. }));
}

#[test]
fn pages_of_an_encoders_input_come_with_admission_and_stay_as_they_are() {
    let groups = vec![KvGroupPolicy::full(4), KvGroupPolicy::encoded(4), KvGroupPolicy::nothing()];
    let mut kv = KvCacheManager::new(11, groups, false).unwrap();
    let id = RequestId(0);
    let with = |n| CachedPrefix::none().with_encoder_tokens(n);
    // One page for three tokens, three for the ten that the encoder read, none for layers without a cache.
    assert_eq!(kv.pages_to_admit(&with(10), 3, 64), 1 + 3);
    assert!(kv.admit(id, with(10), 3, Admission::New).unwrap());
    let pages = |kv: &KvCacheManager| -> Vec<usize> {
        (0..3).map(|g| kv.block_table(id, g).unwrap().len()).collect()
    };
    assert_eq!(pages(&kv), [1, 3, 0]);
    let mut hashes = BlockHashes::default();
    kv.advance(id, &mut hashes, &[7; 3], 3).unwrap();
    assert!(kv.allocate(id, 3, 6).unwrap());
    assert_eq!((pages(&kv), kv.usage().used_pages), (vec![3, 3, 0], 6));
    assert_eq!(kv.pages_outstanding(id, 20, 64), 2);
    // Ten pages: seven are left for tokens beside the encoder's three.
    assert_eq!(kv.max_request_tokens_beside(10, 64), 7 * 4);
    assert_eq!(kv.max_request_tokens_beside(100, 64), 0);
    // What does not fit as a whole gets nothing.
    assert!(!kv.admit(RequestId(1), with(17), 1, Admission::New).unwrap());
    assert_eq!(kv.usage().used_pages, 6);
    kv.free(id);
    assert_eq!(kv.usage().used_pages, 0);
}

#[test]
fn a_range_is_in_the_name_of_every_block_that_it_reaches_into() {
    let named = |ranges: &[(usize, usize)], tokens: &[u32]| {
        let ranges = ranges.iter().map(|&(from, to)| from..to).collect();
        BlockHashes::with_masks(ranges, None).upto(4, 9, tokens).to_vec()
    };
    let same = |a: &[BlockHash], b: &[BlockHash]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let prompt = tokens(0, 20);
    let plain = named(&[], &prompt);
    assert_eq!(same(&plain, &named(&[(6, 11)], &prompt)), 1, "the blocks before it keep their name");
    assert_eq!(same(&named(&[(6, 11)], &prompt), &named(&[(6, 10)], &prompt)), 1);
    let mut other = prompt.clone();
    other[10] = 99;
    assert_eq!(same(&plain, &named(&[], &other)), 2, "causal: the block of the token and those after");
    assert_eq!(same(&named(&[(6, 11)], &prompt), &named(&[(6, 11)], &other)), 1, "the range sees its end");
    assert_eq!(same(&named(&[(8, 12)], &prompt), &named(&[(8, 12)], &prompt)), 5);
}

#[test]
fn a_prefix_does_not_end_inside_a_range() {
    let found = |ranges: Vec<std::ops::Range<usize>>| {
        let mut kv = manager(16, vec![KvGroupPolicy::full(4)]);
        let (prompt, mut hashes) = (tokens(0, 20), BlockHashes::with_masks(ranges, None));
        let none = kv.lookup(&mut hashes, &prompt);
        assert!(kv.admit(RequestId(0), none, 20, Admission::New).unwrap());
        kv.advance(RequestId(0), &mut hashes, &prompt, 20).unwrap();
        kv.lookup(&mut hashes, &prompt).num_tokens()
    };
    assert_eq!(found(vec![]), 16);
    assert_eq!(found(vec![3..5, 6..16]), 16);
    assert_eq!(found(vec![3..5, 6..17]), 0, "the border before 6 is 4, which is inside 3..5");
    assert_eq!(found(vec![9..11, 11..17]), 8);
    assert_eq!(found(vec![0..20, 20..21]), 0);
}

#[test]
fn beyond_an_r_swa_prompt_a_block_is_named_by_where_that_ends() {
    let named = |prompt| BlockHashes::with_masks(vec![], prompt).upto(4, 9, &tokens(0, 20)).to_vec();
    assert_eq!(named(Some(20)), named(None));
    assert_eq!(named(Some(9))[..2], named(None)[..2]);
    assert!(named(Some(9))[2..].iter().zip(&named(Some(10))[2..]).all(|(a, b)| a != b));
    assert_ne!(named(Some(9))[2], named(None)[2]);
}
