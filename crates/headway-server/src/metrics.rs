//! [`Metrics`]: what `/metrics` shows, in the OpenMetrics text format. Names are the field's, with `headway:` in front.

use headway_engine::engine::{EngineStats, FinishReason};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};
use std::{sync::atomic::AtomicU64, time::Duration};

/// Content type of [`Metrics::text`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Seconds; from what a small model on a GPU needs to what a long prompt on a CPU does.
const TTFT: [f64; 18] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0];
const BETWEEN_TOKENS: [f64; 15] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0];
const WHOLE: [f64; 14] = [0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Reason {
    finished_reason: &'static str,
}

/// Counters, gauges and histograms.
pub struct Metrics {
    registry: Registry,
    running: Gauge,
    waiting: Gauge,
    kv_usage: Gauge<f64, AtomicU64>,
    kv_used: Gauge,
    kv_total: Gauge,
    kv_cached: Gauge,
    steps: Total,
    computed: Total,
    preemptions: Total,
    prefix_queries: Total,
    prefix_hits: Total,
    drafted: Total,
    accepted: Total,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    ended: Family<Reason, Counter>,
    ttft: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
}

/// A counter that follows a total which the engine keeps.
#[derive(Clone, Default)]
struct Total(Counter);

impl Total {
    fn follow(&self, total: u64) {
        self.0.inc_by(total.saturating_sub(self.0.get()));
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut r = Registry::default();
        let gauge = |r: &mut Registry, name: &str, help: &str| {
            let g = Gauge::<i64>::default();
            r.register(format!("headway:{name}"), help, g.clone());
            g
        };
        let total = |r: &mut Registry, name: &str, help: &str| {
            let t = Total::default();
            r.register(format!("headway:{name}"), help, t.0.clone());
            t
        };
        let seconds = |r: &mut Registry, name: &str, help: &str, buckets: &[f64]| {
            let h = Histogram::new(buckets.iter().copied());
            r.register_with_unit(format!("headway:{name}"), help, Unit::Seconds, h.clone());
            h
        };
        let kv_usage = Gauge::<f64, AtomicU64>::default();
        r.register("headway:kv_cache_usage_perc", "Share of KV cache pages in use, 0 to 1", kv_usage.clone());
        let ended = Family::<Reason, Counter>::default();
        r.register("headway:request_success", "Requests by how they ended", ended.clone());
        Self {
            running: gauge(&mut r, "num_requests_running", "Requests with pages now"),
            waiting: gauge(&mut r, "num_requests_waiting", "Requests that wait for pages"),
            kv_used: gauge(&mut r, "kv_cache_used_pages", "Pages that requests hold"),
            kv_total: gauge(&mut r, "kv_cache_total_pages", "Pages of the pool"),
            kv_cached: gauge(&mut r, "kv_cache_cached_pages", "Free pages that still hold a prefix"),
            steps: total(&mut r, "steps", "Steps that computed something"),
            computed: total(&mut r, "computed_tokens", "Tokens computed in them"),
            preemptions: total(&mut r, "num_preemptions", "Times that a request lost its pages"),
            prefix_queries: total(
                &mut r,
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache",
            ),
            prefix_hits: total(&mut r, "prefix_cache_hits", "Prompt tokens found there"),
            drafted: total(&mut r, "spec_decode_num_draft_tokens", "Tokens drafted"),
            accepted: total(&mut r, "spec_decode_num_accepted_tokens", "Drafted tokens that stood"),
            prompt_tokens: total(&mut r, "prompt_tokens", "Prompt tokens of finished requests").0,
            generation_tokens: total(&mut r, "generation_tokens", "Tokens generated").0,
            ttft: seconds(&mut r, "time_to_first_token", "From arrival to the first token", &TTFT),
            between_tokens: seconds(
                &mut r,
                "inter_token_latency",
                "From one token to the next",
                &BETWEEN_TOKENS,
            ),
            whole: seconds(&mut r, "e2e_request_latency", "From arrival to the last token", &WHOLE),
            kv_usage,
            ended,
            registry: r,
        }
    }
}

impl Metrics {
    /// Everything, as text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut out, &self.registry);
        out
    }

    /// Takes the engine's counters over, once a step.
    pub(crate) fn engine(&self, s: &EngineStats) {
        self.running.set(s.running as i64);
        self.waiting.set(s.waiting as i64);
        self.kv_usage.set(s.kv.fraction());
        self.kv_used.set(s.kv.used_pages as i64);
        self.kv_total.set(s.kv.total_pages as i64);
        self.kv_cached.set(s.kv.cached_free_pages as i64);
        self.steps.follow(s.steps);
        self.computed.follow(s.computed_tokens);
        self.preemptions.follow(s.preemptions);
        self.prefix_queries.follow(s.prefix.queried_tokens);
        self.prefix_hits.follow(s.prefix.hit_tokens);
        self.drafted.follow(s.drafted_tokens);
        self.accepted.follow(s.accepted_tokens);
    }

    pub(crate) fn first_token(&self, after: Duration) {
        self.generation_tokens.inc();
        self.ttft.observe(after.as_secs_f64());
    }

    pub(crate) fn next_token(&self, after: Duration) {
        self.generation_tokens.inc();
        self.between_tokens.observe(after.as_secs_f64());
    }

    pub(crate) fn finished(&self, reason: FinishReason, after: Duration, prompt_tokens: usize) {
        self.prompt_tokens.inc_by(prompt_tokens as u64);
        self.whole.observe(after.as_secs_f64());
        self.ended(reason.name());
    }

    pub(crate) fn aborted(&self) {
        self.ended("abort");
    }

    pub(crate) fn failed(&self) {
        self.ended("error");
    }

    fn ended(&self, finished_reason: &'static str) {
        self.ended.get_or_create(&Reason { finished_reason }).inc();
    }

    /// Requests that run or wait.
    pub fn unfinished(&self) -> i64 {
        self.running.get() + self.waiting.get()
    }
}
