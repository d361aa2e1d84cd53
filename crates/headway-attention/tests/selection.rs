//! Which backend a layer gets: priorities, explicit requests, reasons, warnings.

mod support;

use headway_attention::{process::rules::AttnType, *};
use headway_tensor::DType;
use support::registry;

fn need() -> LayerNeed {
    LayerNeed { head_size: 64, head_size_v: 64, dtype: DType::F32, ..LayerNeed::default() }
}

fn name(need: &LayerNeed, request: &BackendRequest) -> Result<String> {
    select(&registry(), "layer 3", need, request).map(|s| s.backend.rules().name.to_string())
}

#[test]
fn the_first_that_fits() -> Result<()> {
    let auto = BackendRequest::default();
    assert_eq!(name(&need(), &auto)?, "NO_WINDOW");
    let windowed = LayerNeed { sliding_window: Some(4), ..need() };
    assert_eq!(name(&windowed, &auto)?, "SMALL_BLOCKS");
    let s = select(&registry(), "layer 3", &windowed, &auto)?;
    assert_eq!(s.refused.len(), 1);
    assert_eq!(s.refused[0].backend, "NO_WINDOW");
    assert_eq!(s.refused[0].reasons, [Refusal::from("sliding window not supported")]);
    assert!(s.warnings.is_empty());
    Ok(())
}

#[test]
fn an_explicit_request_is_no_hint() {
    let request = BackendRequest { backend: Some("no_window".into()), ..BackendRequest::default() };
    assert_eq!(name(&need(), &request).unwrap(), "NO_WINDOW");
    let windowed = LayerNeed { sliding_window: Some(4), head_size: 80, has_sinks: true, ..need() };
    let e = name(&windowed, &request).unwrap_err().to_string();
    for part in
        ["layer 3", "NO_WINDOW", "sliding window not supported", "attention sinks", "--attention-backend"]
    {
        assert!(e.contains(part), "{part} in {e}");
    }
    let unknown = BackendRequest { backend: Some("HOST_ATN".into()), ..BackendRequest::default() };
    let e = name(&need(), &unknown).unwrap_err().to_string();
    assert!(e.contains("did you mean HOST_ATTN"), "{e}");
}

#[test]
fn per_kind_wins() -> Result<()> {
    let request = BackendRequest {
        backend: Some("NO_WINDOW".into()),
        per_kind: BackendRequest::parse_per_kind("sliding_window=HOST_ATTN")?,
    };
    let windowed = LayerNeed { sliding_window: Some(4), ..need() };
    assert_eq!(name(&windowed, &request)?, "HOST_ATTN");
    assert_eq!(name(&need(), &request)?, "NO_WINDOW");
    for (text, part) in [("window=X", "sliding_window"), ("full", "KIND=BACKEND"), ("full=A,full=B", "twice")]
    {
        let e = BackendRequest::parse_per_kind(text).unwrap_err().to_string();
        assert!(e.contains(part), "{e}");
    }
    Ok(())
}

#[test]
fn the_general_request_is_for_layers_that_attend() -> Result<()> {
    let request = BackendRequest { backend: Some("NO_WINDOW".into()), ..BackendRequest::default() };
    let mixer = LayerNeed { kind: KindTag::StateSpace, ..need() };
    assert_eq!(request.for_layer(&mixer), None);
    assert_eq!(request.for_layer(&need()), Some(("NO_WINDOW", "--attention-backend")));
    let named = BackendRequest { per_kind: BackendRequest::parse_per_kind("state_space=X")?, ..request };
    assert_eq!(named.for_layer(&mixer), Some(("X", "--backend-per-kind")));
    Ok(())
}

#[test]
fn none_valid_lists_every_backend() {
    let e =
        name(&LayerNeed { dtype: DType::I32, ..need() }, &BackendRequest::default()).unwrap_err().to_string();
    for part in ["layer 3", "NO_WINDOW: [dtype", "SMALL_BLOCKS: [dtype", "HOST_ATTN: [dtype"] {
        assert!(e.contains(part), "{part} in {e}");
    }
}

#[test]
fn a_block_size_that_alone_excludes_is_a_warning() -> Result<()> {
    let s = select(
        &registry(),
        "layer 0",
        &LayerNeed { block_size: Some(48), ..need() },
        &BackendRequest::default(),
    )?;
    assert_eq!(s.backend.rules().name, "SMALL_BLOCKS");
    assert_eq!(s.warnings.len(), 1);
    assert!(
        s.warnings[0].contains("--block-size 48") && s.warnings[0].contains("NO_WINDOW"),
        "{:?}",
        s.warnings
    );
    Ok(())
}

#[test]
fn cache_rules_are_for_layers_with_a_cache() -> Result<()> {
    let encoder = LayerNeed {
        attn_type: AttnType::EncoderOnly,
        has_cache: false,
        kv_cache_dtype: Some("fp8".into()),
        block_size: Some(7),
        ..need()
    };
    assert_eq!(name(&encoder, &BackendRequest::default())?, "NO_WINDOW");
    assert!(name(&LayerNeed { has_cache: true, ..encoder }, &BackendRequest::default()).is_err());
    Ok(())
}

#[test]
fn invariance_is_a_rule_of_selection() -> Result<()> {
    let mut r = registry();
    r.register::<support::Invariant>()?;
    let invariant = LayerNeed { use_batch_invariant: true, ..need() };
    let s = select(&r, "layer 0", &invariant, &BackendRequest::default())?;
    assert_eq!(s.backend.rules().name, "INVARIANT");
    assert_eq!(s.refused.len(), 3);
    Ok(())
}

#[test]
fn preferred_block_sizes() {
    let rules = registry().get("SMALL_BLOCKS").unwrap().rules().clone();
    assert_eq!(rules.preferred_block_size(64), 64);
    assert_eq!(rules.preferred_block_size(24), 16);
    assert_eq!(RuleBook { preferred_block_size: Some(32), ..rules }.preferred_block_size(64), 32);
}

#[test]
fn what_stands_back_is_chosen_by_name_or_where_nothing_else_fits() -> Result<()> {
    use headway_attention::process::select::{Candidate, choose};
    /// A rule book, and why it stands back.
    struct Slow(RuleBook, Option<&'static str>);
    impl Candidate for Slow {
        fn rules(&self) -> &RuleBook {
            &self.0
        }
        fn combination(&self, _: &LayerNeed) -> Option<Refusal> {
            None
        }
        fn stands_back(&self, _: &LayerNeed) -> Option<Refusal> {
            self.1.map(Refusal::from)
        }
    }
    let of = |name: &'static str, supports_sinks, why| {
        Slow(RuleBook { name: name.into(), supports_sinks, ..RuleBook::default() }, why)
    };
    let all = [of("SLOW", true, Some("its faster module is missing")), of("PLAIN", false, None)];
    let need = LayerNeed::default();
    let choice = choose(&all, "layer 0", &need, None)?;
    assert_eq!((choice.chosen, choice.refused.len()), (1, 1));
    assert_eq!(choice.refused[0].backend, "SLOW");
    assert_eq!(choice.refused[0].reasons, [Refusal::from("its faster module is missing")]);
    let named = choose(&all, "layer 0", &need, Some((0, "--attention-backend")))?;
    assert_eq!((named.chosen, named.refused.len()), (0, 0));
    let sinks = LayerNeed { has_sinks: true, ..need };
    let alone = choose(&all, "layer 0", &sinks, None)?;
    assert_eq!((alone.chosen, alone.refused[0].backend.as_str()), (0, "PLAIN"));
    Ok(())
}

#[test]
fn chunks_are_asked_for() {
    let chunked = LayerNeed { use_chunked_local: true, ..need() };
    let e = name(&chunked, &BackendRequest::default()).unwrap_err().to_string();
    assert!(e.contains("HOST_ATTN: [chunked local attention not supported]"), "{e}");
    let takes = RuleBook { supports_chunked_local: true, ..RuleBook::default() };
    assert!(takes.refusals(&LayerNeed { use_chunked_local: true, ..LayerNeed::default() }).is_empty());
}
