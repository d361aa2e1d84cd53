//! Random orders of add, chunk, decode, preempt, resume, abort and finish, against the shadow.

use std::collections::HashMap;

use proptest::prelude::*;

use super::shadow::{Shadow, Work, check_pool};
use crate::kv::{Admission, BlockHashes, KvCacheManager, KvGroupPolicy, RequestId};

/// A request as the test drives it.
struct Live {
    id: RequestId,
    tokens: Vec<u32>,
    hashes: BlockHashes,
    computed: usize,
    admitted: bool,
    ran_before: bool,
}

struct World {
    kv: KvCacheManager,
    shadow: Shadow,
    live: Vec<Live>,
    next: u64,
    refused: usize,
}

fn group_sets() -> impl Strategy<Value = Vec<KvGroupPolicy>> {
    use KvGroupPolicy as P;
    prop_oneof![
        Just(vec![P::full(4)]),
        Just(vec![P::full(1)]),
        Just(vec![P::full(4), P::sliding_window(4, 6)]),
        Just(vec![P::sliding_window(2, 3), P::full(4)]),
        Just(vec![P::sliding_window(4, 9)]),
        Just(vec![P::sliding_window(4, 4), P::sliding_window(4, 5), P::sliding_window(2, 1)]),
        Just(vec![P::full(4), P::chunked_local(4, 8), P::sliding_window(8, 2)]),
        Just(vec![P::chunked_local(2, 5), P::full(3)]),
    ]
}

/// Prompts from few families, so that prefixes are shared, part or whole.
fn prompt(seed: u16) -> Vec<u32> {
    let (family, len) = (u32::from(seed % 3), 1 + usize::from(seed / 3 % 29));
    let mut tokens: Vec<u32> = (0..len as u32).map(|i| family * 100 + i).collect();
    if seed.is_multiple_of(5) {
        tokens[len / 2] = 7;
    }
    tokens
}

impl World {
    fn new(pages: usize, groups: Vec<KvGroupPolicy>, caching: bool) -> Self {
        let kv = KvCacheManager::new(pages, groups, caching).expect("a valid configuration");
        Self { kv, shadow: Shadow::default(), live: Vec::new(), next: 0, refused: 0 }
    }

    fn add(&mut self, seed: u16) {
        let id = RequestId(self.next);
        self.next += 1;
        let (tokens, hashes) = (prompt(seed), BlockHashes::default());
        self.live.push(Live { id, tokens, hashes, computed: 0, admitted: false, ran_before: false });
    }

    /// Admits a request or allocates its next chunk; then plays the step.
    fn step(&mut self, at: usize, chunk: usize) {
        let request = &mut self.live[at];
        let granted = if request.admitted {
            let left = request.tokens.len() - request.computed;
            self.kv.allocate(request.id, request.computed, chunk.min(left)).expect("a known request")
        } else {
            let prefix = self.kv.lookup(&mut request.hashes, &request.tokens);
            let found = prefix.num_tokens();
            assert!(found < request.tokens.len(), "at least one token is computed");
            assert_eq!(found % self.kv.prefix_granularity_tokens(), 0);
            let left = request.tokens.len() - found;
            let kind = if request.ran_before { Admission::Resumed } else { Admission::New };
            let granted = self.kv.admit(request.id, prefix, chunk.min(left), kind).expect("not admitted yet");
            if granted {
                (request.admitted, request.computed) = (true, found);
            }
            granted
        };
        match granted {
            true => self.compute(at, chunk),
            false => self.refused += 1,
        }
    }

    fn compute(&mut self, at: usize, chunk: usize) {
        let request = &mut self.live[at];
        let len = chunk.min(request.tokens.len() - request.computed);
        let work = Work { id: request.id, tokens: &request.tokens, start: request.computed, len };
        let value = self.shadow.run(&self.kv, &[work])[0];
        request.computed += len;
        request.ran_before = true;
        self.kv
            .advance(request.id, &mut request.hashes, &request.tokens, request.computed)
            .expect("it has pages");
        if request.computed == request.tokens.len() {
            request.tokens.push((value % 5) as u32);
        }
    }

    fn preempt(&mut self, at: usize) {
        let request = &mut self.live[at];
        assert_eq!(self.kv.free(request.id), request.admitted);
        (request.admitted, request.computed) = (false, 0);
    }

    fn end(&mut self, at: usize) {
        let request = self.live.swap_remove(at);
        assert_eq!(self.kv.free(request.id), request.admitted);
    }

    fn check(&self) {
        let tokens: HashMap<_, _> = self.live.iter().map(|r| (r.id, r.tokens.clone())).collect();
        check_pool(&self.kv, &tokens);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn any_order_of_calls_keeps_every_promise(
        groups in group_sets(),
        caching in any::<bool>(),
        pages in 3usize..60,
        calls in prop::collection::vec((0u8..12, any::<u16>()), 1..150),
    ) {
        let mut world = World::new(pages, groups, caching);
        for (call, seed) in calls {
            let at = if world.live.is_empty() { 0 } else { usize::from(seed) % world.live.len() };
            match call {
                0 | 1 => world.add(seed),
                _ if world.live.is_empty() => {}
                2 => world.preempt(at),
                3 => world.end(at),
                4 | 5 => world.step(at, 1),
                6 => world.step(at, usize::MAX / 4),
                7 if seed % 64 == 0 => world.kv.reset_prefix_cache(),
                _ => world.step(at, 1 + usize::from(seed / 7 % 9)),
            }
            world.check();
        }
        while !world.live.is_empty() {
            world.end(0);
            world.check();
        }
        let usage = world.kv.usage();
        prop_assert_eq!(usage.free_pages, usage.total_pages);
        if !caching {
            prop_assert_eq!(usage.cached_free_pages, 0);
            prop_assert_eq!(world.kv.stats(), Default::default());
        }
    }

    /// A request of the largest length that fits alone can be computed alone, whatever the chunks; one token more can
    /// not when computed at once.
    #[test]
    fn the_longest_request_fits_and_no_longer_one(
        groups in group_sets(),
        pages in 3usize..60,
        max_chunk in 1usize..20,
        chunks in prop::collection::vec(1usize..20, 1..20),
    ) {
        let mut world = World::new(pages, groups, true);
        let longest = world.kv.max_request_tokens(max_chunk);
        prop_assume!(longest > 0);
        let length = longest.min(500);
        world.add(0);
        world.live[0].tokens = (0..length as u32).collect();
        let mut chunks = chunks.iter().cycle();
        while world.live[0].computed < length {
            let chunk = chunks.next().map_or(1, |c| *c.min(&max_chunk));
            world.step(0, chunk);
            prop_assert_eq!(world.refused, 0);
            prop_assert!(world.kv.usage().used_pages <= world.kv.peak_pages(length, max_chunk));
            world.check();
        }
        if longest < usize::MAX {
            prop_assert!(world.kv.peak_pages(longest + 1, max_chunk) > world.kv.usage().total_pages);
        }
    }
}
