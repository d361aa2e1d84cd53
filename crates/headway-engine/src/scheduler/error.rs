//! What the scheduler refuses, with the numbers that decided.

use super::RequestId;
use crate::kv::KvError;

/// Why the scheduler refused a configuration, a request or a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SchedulerError {
    /// An encoder reads its input in one step.
    #[error(
        "the encoder's input has {encoder_tokens} tokens, and one step takes {max_num_batched_tokens}; raise --max-num-batched-tokens to {encoder_tokens}"
    )]
    EncoderInputTooLong {
        /// Its length.
        encoder_tokens: usize,
        /// The limit.
        max_num_batched_tokens: usize,
    },
    /// A limit of 0.
    #[error("{option} must be at least 1, got 0")]
    ZeroLimit {
        /// The option.
        option: &'static str,
    },
    /// Not every running request could decode in every step.
    #[error(
        "--max-num-batched-tokens {max_num_batched_tokens} is less than --max-num-seqs {max_num_seqs}: each running \
         request needs one token a step; raise the first or lower the second"
    )]
    BudgetBelowSeqs {
        /// Token budget of a step.
        max_num_batched_tokens: usize,
        /// Requests of a step.
        max_num_seqs: usize,
    },
    /// The KV cache cannot hold one token of each group.
    #[error(
        "the KV cache of {total_pages} pages cannot hold even one token: {needed_pages} pages are needed; give the cache \
         more memory"
    )]
    CacheTooSmall {
        /// Pages of the pool.
        total_pages: usize,
        /// Pages that one token takes.
        needed_pages: usize,
    },
    /// A request without prompt tokens.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// A request that may generate nothing.
    #[error("--max-tokens must be at least 1, got 0")]
    NothingToGenerate,
    /// Prompt and tokens to generate exceed the model length.
    #[error(
        "the request needs {prompt_tokens} prompt + {max_tokens} generated = {total} tokens, more than the {max_model_len} \
         of --max-model-len; shorten the prompt or lower --max-tokens"
    )]
    TooLongForModel {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens it may generate.
        max_tokens: usize,
        /// Their sum.
        total: usize,
        /// The limit.
        max_model_len: usize,
    },
    /// The request would never fit the KV cache, even alone.
    #[error(
        "the request keeps up to {cached_tokens} tokens ({prompt_tokens} prompt + {max_tokens} generated, the last not \
         kept) in the KV cache, which holds at most {max_cached_tokens} tokens of one request ({needed_pages} pages \
         needed, {total_pages} in all); shorten the prompt, lower --max-tokens or give the cache more memory"
    )]
    NeverFits {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens it may generate.
        max_tokens: usize,
        /// Tokens kept in the cache at the end.
        cached_tokens: usize,
        /// The longest request that fits alone.
        max_cached_tokens: usize,
        /// Pages it would hold at its peak.
        needed_pages: usize,
        /// Pages of the pool.
        total_pages: usize,
    },
    /// A range that no step has room for.
    #[error(
        "prompt tokens {}..{} see each other in both directions and are computed in one step of at most {room} tokens; \
         raise --max-num-batched-tokens to {} or more, or shorten the range",
        range.start, range.end, range.len()
    )]
    RangeTooLong {
        /// Positions of the prompt.
        range: std::ops::Range<usize>,
        /// Tokens of one request in a step.
        room: usize,
    },
    /// `schedule` before the last step was finished or cancelled.
    #[error("a step is under way: finish or cancel it before scheduling the next")]
    StepUnderWay,
    /// `finish_step` or `cancel_step` without a step.
    #[error("no step is under way")]
    NoStep,
    /// The outcomes do not match the plan.
    #[error("the step wants {expected} sampled tokens (one a request with needs_logits), got {got}")]
    WrongOutcomes {
        /// Requests of the plan that need logits.
        expected: usize,
        /// Outcomes passed.
        got: usize,
    },
    /// The plan passed is not the one of the step under way.
    #[error("the plan is not that of the step under way")]
    WrongPlan,
    /// A request goes on after its last allowed token.
    #[error("request {request} has generated its {max_tokens} tokens and must be marked finished")]
    PastMaxTokens {
        /// The request.
        request: RequestId,
        /// Tokens it may generate.
        max_tokens: usize,
    },
    /// More tokens stand than were drafted.
    #[error("request {request}: {accepted} drafted tokens were accepted of {drafted}")]
    NotDrafted {
        /// The request.
        request: RequestId,
        /// Tokens drafted for it in the step.
        drafted: usize,
        /// Tokens said to stand.
        accepted: usize,
    },
    /// Requests wait, nothing runs, and still nothing could be scheduled; a fault of the scheduler.
    #[error(
        "{waiting} requests wait and none could be scheduled with {free_pages} free pages; this is a bug"
    )]
    Stalled {
        /// Waiting requests.
        waiting: usize,
        /// Free pages.
        free_pages: usize,
    },
    /// A refusal of the KV cache manager.
    #[error(transparent)]
    Kv(#[from] KvError),
}
