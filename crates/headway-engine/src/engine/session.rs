//! Lifetime: one request. What the engine keeps of it besides the scheduler's tokens: parameters,
//! text in the making, times.

use super::request::{FinishReason, Finished, GenerateRequest, NewToken, RequestError, Timings};
use crate::{
    sampling::{Constraint, Row, Sampled, SamplingParams, fresh_seed},
    speculation::{LookupSizes, PromptLookup, SpeculationStats},
    text::{StopMatcher, StreamDecoder, Tokenizer},
};
use std::{sync::Arc, time::Instant};

/// One running request.
pub(super) struct Session {
    pub params: Arc<SamplingParams>,
    pub seed: u64,
    pub constraint: Option<Box<dyn Constraint>>,
    pub prompt_tokens: usize,
    cached_tokens: usize,
    text: Option<(StreamDecoder, StopMatcher)>,
    /// Characters decoded so far, held back or not.
    decoded: usize,
    token_ids: Vec<u32>,
    started: Option<Instant>,
    first_token: Option<Instant>,
    lookup: Option<PromptLookup>,
    speculation: SpeculationStats,
}

impl Session {
    pub(super) fn new(
        request: &GenerateRequest,
        tokenizer: Option<&Tokenizer>,
        lookup: Option<LookupSizes>,
    ) -> Result<Self, RequestError> {
        let mut params = request.sampling.clone();
        // Where a grammar lets an answer end nothing else may follow.
        params.ignore_eos &= request.constraint.is_none();
        let stop = StopMatcher::new(&params.stop)?;
        if tokenizer.is_none() && !params.stop.is_empty() {
            return Err(RequestError::StopWithoutTokenizer);
        }
        Ok(Self {
            seed: params.seed.unwrap_or_else(fresh_seed),
            params: Arc::new(params),
            constraint: request.constraint.clone(),
            prompt_tokens: request.prompt_ids.len(),
            cached_tokens: 0,
            text: tokenizer.map(|t| (StreamDecoder::continuing(t.clone(), true), stop)),
            decoded: 0,
            token_ids: vec![],
            started: None,
            first_token: None,
            lookup: lookup.filter(|_| request.constraint.is_none()).map(PromptLookup::new),
            speculation: SpeculationStats::default(),
        })
    }

    /// What the next token is sampled by, after `tokens`.
    pub(super) fn row<'a>(&'a self, tokens: &'a [u32], eos_ids: &'a [u32]) -> Row<'a> {
        Row { prompt_len: self.prompt_tokens, eos_ids, ..Row::new(&self.params, tokens, self.seed) }
    }

    /// A step with tokens of the request begins.
    pub(super) fn begin(&mut self, cached_tokens: usize) {
        self.started.get_or_insert_with(Instant::now);
        self.cached_tokens = cached_tokens;
    }

    /// Appends to `drafts` at most `most` tokens that may follow `tokens`.
    pub(super) fn draft(&mut self, tokens: &[u32], most: usize, drafts: &mut Vec<u32>) {
        if let Some(lookup) = &mut self.lookup {
            lookup.propose(tokens, most, drafts);
        }
    }

    /// Takes note of how many of its drafted tokens were right.
    pub(super) fn drafted(&mut self, drafted: usize, accepted: usize) {
        self.speculation.record(drafted, accepted);
        if let Some(lookup) = self.lookup.as_mut().filter(|_| drafted > 0) {
            lookup.learn_outcome(drafted, accepted);
        }
    }

    /// Takes a sampled token: what to tell of it, and whether it is the last.
    pub(super) fn accept(
        &mut self,
        sampled: Sampled,
        eos_ids: &[u32],
        last_allowed: bool,
    ) -> (NewToken, Option<FinishReason>) {
        let token = sampled.token;
        self.first_token.get_or_insert_with(Instant::now);
        self.token_ids.push(token);
        let ends = self.params.is_stop_token(token, eos_ids);
        let text_offset = self.decoded;
        let mut text = String::new();
        let mut stopped = false;
        if let Some((decoder, stop)) = &mut self.text {
            // An ending token has no text; what was held back comes out with it.
            let piece = if ends { String::new() } else { decoder.push(token) };
            let searched = self.token_ids.len() > self.params.min_tokens;
            self.decoded += piece.chars().count();
            text = if searched { stop.push(&piece) } else { piece };
            if ends || (last_allowed && stop.matched().is_none()) {
                text.push_str(&stop.push(&decoder.finish()));
                text.push_str(&stop.finish());
            }
            stopped = stop.matched().is_some();
        }
        let reason = if ends || stopped {
            Some(FinishReason::Stop)
        } else {
            last_allowed.then_some(FinishReason::Length)
        };
        let (own, logprobs) = sampled.logprobs.unzip();
        let logprob = own.map(|t| t.logprob);
        (NewToken { token_id: token, text, text_offset, logprob, logprobs }, reason)
    }

    /// The request's account.
    pub(super) fn finish(self, reason: FinishReason) -> Finished {
        let now = Instant::now();
        let first = self.first_token.unwrap_or(now);
        let started = self.started.unwrap_or(first);
        let timings = Timings {
            prefill_s: (first - started).as_secs_f64(),
            prefill_tokens: self.prompt_tokens - self.cached_tokens,
            decode_s: (now - first).as_secs_f64(),
            decode_tokens: self.token_ids.len().saturating_sub(1),
        };
        Finished {
            reason,
            cached_tokens: self.cached_tokens,
            seed: self.seed,
            token_ids: self.token_ids,
            timings,
            speculation: self.speculation,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::Path;

    fn accepted(tokenizer: &Tokenizer, ids: &[u32], stop: &[String]) -> Vec<NewToken> {
        let sampling = SamplingParams { stop: stop.to_vec(), ..SamplingParams::greedy() };
        let request = GenerateRequest { prompt_ids: vec![1], sampling, ..GenerateRequest::default() };
        let mut session = Session::new(&request, Some(tokenizer), None).unwrap();
        let mut out = vec![];
        for (i, &token) in ids.iter().enumerate() {
            let (new, reason) = session.accept(Sampled { token, logprobs: None }, &[], i + 1 == ids.len());
            out.push(new);
            if reason.is_some() {
                break;
            }
        }
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        /// Without stop strings text is shown as it is decoded, so offsets are the lengths of what was shown before;
        /// with them they are the same, whatever is held back.
        #[test]
        fn what_is_held_back_moves_no_offset(
            ids in prop::collection::vec(3u32..512, 1..30),
            begins in 0usize..40,
            length in 1usize..6,
        ) {
            let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-llama");
            let tokenizer = Tokenizer::from_dir(&data).unwrap();
            let free = accepted(&tokenizer, &ids, &[]);
            let mut shown = 0;
            for token in &free {
                prop_assert_eq!(token.text_offset, shown);
                shown += token.text.chars().count();
            }
            let text: String = free.iter().map(|t| t.text.as_str()).collect();
            // Begins as a piece of the text does, and mostly goes on otherwise.
            let mut stop: String = text.chars().skip(begins % (shown + 1)).take(length).collect();
            stop.push('\u{1F9ED}');
            let held = accepted(&tokenizer, &ids, std::slice::from_ref(&stop));
            let offsets = |tokens: &[NewToken]| tokens.iter().map(|t| t.text_offset).collect::<Vec<_>>();
            prop_assert_eq!(offsets(&held), offsets(&free)[..held.len()].to_vec());
            prop_assert_eq!(held.iter().map(|t| t.text.as_str()).collect::<String>(), text);
        }
    }
}
