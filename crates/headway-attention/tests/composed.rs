//! Backends made of two: names, what is asked of both, and that each row of a step is computed by its part from what a
//! single backend would have been given.

#[path = "support/sim.rs"]
mod sim;
mod support;

#[path = "composed/books.rs"]
mod books;
#[path = "composed/marked.rs"]
mod marked;
#[path = "composed/steps.rs"]
mod steps;

use headway_attention::*;
use marked::registry;
use sim::{SimBuilder, SimExec, SimLayer};

fn refused(name: &str) -> String {
    registry().get(name).err().map(|e| e.to_string()).unwrap_or_default()
}

#[test]
fn a_composition_has_a_name_of_two() -> Result<()> {
    let r = registry();
    assert_eq!(r.get("mark_1 + Mark_2")?.rules().name, "MARK_1+MARK_2");
    assert_eq!(
        r.get("MARK_2+MARK_1")?.parts().unwrap().map(|p| p.rules().name.to_string()),
        ["MARK_2", "MARK_1"]
    );
    assert!(r.get("MARK_1")?.parts().is_none());
    for (name, words) in [
        ("MARK_1+MARK_1", "both parts are MARK_1"),
        ("MARK_1+MARK_2+MARK_1", "names 3 backends; write DECODE+PREFILL"),
        ("MARK_1+", "names 1 backends"),
        ("MARK_1+MRK_2", "no attention backend is named MRK_2; there are: MARK_1, MARK_2"),
        ("MRK_2+MARK_1", "(did you mean MARK_2?)"),
        ("MARK_1+LATENT", "LATENT is for MLA; backends of standard attention can be composed"),
        ("MARK_1+SIM_ATTN", "MARK_1 runs on cpu, SIM_ATTN on sim; give two of one platform"),
        ("MARK_1+WRITES_ITSELF", "WRITES_ITSELF writes the KV cache in its kernel, MARK_1 before it"),
    ] {
        assert!(refused(name).contains(words), "{name}: {}", refused(name));
    }
    // It is in no list, so that nothing chooses it unasked.
    assert!(r.iter().all(|b| !b.rules().name.contains('+')));
    assert!(matches!(registry().register::<marked::Plus>(), Err(AttentionError::Composition { .. })));
    Ok(())
}

/// The simulated device's own backend of a name that the host has.
enum SimMark {}

impl AttentionBackend for SimMark {
    const CONTRACT: u32 = 1;
    type Exec = SimExec;
    type Kind = Standard;
    type Config = ();
    type Builder = SimBuilder;
    type Impl = SimLayer;
    fn rules() -> RuleBook {
        RuleBook { name: "MARK_2".into(), platform: "sim".into(), ..RuleBook::default() }
    }
}

#[test]
fn parts_are_of_one_platform_where_both_have_one() -> Result<()> {
    let mut r = registry();
    r.register::<SimMark>()?;
    let platform = |name, on| Ok::<_, AttentionError>(r.get_on(name, on)?.rules().platform.to_string());
    assert_eq!(platform("MARK_1+MARK_2", "cpu")?, "cpu");
    assert_eq!(platform("SIM_ATTN+MARK_2", "sim")?, "sim");
    assert_eq!(r.get("SIM_ATTN+MARK_2")?.rules().platform, "sim");
    // As one backend does, a pair of another platform refuses by its rules.
    let need = LayerNeed { platform: "sim".into(), ..marked::need() };
    let request = BackendRequest { backend: Some("MARK_1+MARK_2".into()), ..BackendRequest::default() };
    let e = select(&r, "layer 0", &need, &request).err().unwrap().to_string();
    assert!(e.contains("MARK_1 (decode): runs on cpu, not on sim"), "{e}");
    Ok(())
}

#[test]
fn it_is_chosen_by_name_alone_and_refuses_by_part() -> Result<()> {
    let r = registry();
    let asked = |name: &str| BackendRequest { backend: Some(name.into()), ..BackendRequest::default() };
    let s = select(&r, "layer 3", &marked::need(), &asked("mark_2+mark_1"))?;
    assert_eq!(s.backend.rules().name, "MARK_2+MARK_1");
    let s = select(&r, "layer 3", &marked::need(), &BackendRequest::default())?;
    assert_eq!(s.backend.rules().name, "MARK_1");
    let per_kind = BackendRequest {
        per_kind: BackendRequest::parse_per_kind("full=MARK_1+MARK_2")?,
        ..BackendRequest::default()
    };
    assert_eq!(select(&r, "layer 3", &marked::need(), &per_kind)?.backend.rules().name, "MARK_1+MARK_2");
    let says =
        |need: LayerNeed| select(&r, "layer 3", &need, &asked("MARK_1+MARK_2")).err().unwrap().to_string();
    // MARK_2 has no windows and no sinks, MARK_1 no sinks.
    let e = says(LayerNeed { sliding_window: Some(4), has_sinks: true, ..marked::need() });
    for part in [
        "Selected backend MARK_1+MARK_2 is not valid for layer 3",
        "MARK_1 (decode): attention sinks not supported",
        "MARK_2 (prefill): attention sinks not supported",
        "MARK_2 (prefill): sliding window not supported",
        "--attention-backend",
    ] {
        assert!(e.contains(part), "{part} in {e}");
    }
    assert!(!e.contains("(decode): sliding window"), "{e}");
    let e = says(LayerNeed { use_batch_invariant: true, ..marked::need() });
    assert!(e.contains(": batch invariance not supported") && !e.contains("(decode)"), "{e}");
    // The parts' combination rules, and a cache that they would shape differently.
    let e = says(LayerNeed { num_heads: 13, ..marked::need() });
    assert!(e.contains("MARK_1 (decode): 13 heads not supported; MARK_2 (prefill): 13 heads"), "{e}");
    let e = select(&r, "layer 3", &marked::need(), &asked("MARK_1+PADDED")).err().unwrap().to_string();
    assert!(e.contains("MARK_1 and PADDED shape the KV cache of such a layer differently"), "{e}");
    Ok(())
}

#[test]
fn each_part_has_its_own_table() -> Result<()> {
    let backend = registry().get("MARK_1+MARK_2")?;
    let tables = |json: serde_json::Value| json.as_object().cloned().unwrap();
    backend.configure(&tables(serde_json::json!({ "MARK_2": { "offset": 5 }, "OTHER": 7 })))?;
    let e = backend.configure(&tables(serde_json::json!({ "MARK_2": { "ofset": 5 } }))).err().unwrap();
    assert!(e.to_string().contains("[backend.MARK_2]"), "{e}");
    let own = serde_json::json!({ "MARK_1+MARK_2": {} });
    for e in [backend.configure(&tables(own)), backend.parse_config(Some(&serde_json::json!({})))] {
        let e = e.err().unwrap().to_string();
        assert!(e.contains("each part has: [backend.MARK_1] and [backend.MARK_2]"), "{e}");
    }
    // One backend's configuration is not another's.
    let other = registry().get("MARK_1")?.parse_config(None)?;
    let group = GroupInfo::new(marked::spec(), 1);
    assert!(matches!(backend.plan(&group, &other), Err(AttentionError::Config { .. })));
    Ok(())
}

#[test]
fn what_is_planned_is_true_of_the_pair() -> Result<()> {
    let r = registry();
    let plan = |name: &str, drafts| {
        let b = r.get(name)?;
        let group = GroupInfo { num_speculative_tokens: drafts, ..GroupInfo::new(marked::spec(), 1) };
        b.plan(&group, &b.parse_config(None)?)
    };
    let [one, two] = [plan("MARK_1", 0)?, plan("MARK_2", 0)?];
    assert_eq!(one.reorder_batch_threshold, None);
    assert_eq!((one.graph_support, two.graph_support), (GraphSupport::Always, GraphSupport::UniformBatch));
    let p = plan("MARK_1+MARK_2", 0)?;
    assert_eq!((p.graph_support, p.reorder_batch_threshold), (GraphSupport::UniformBatch, Some(1)));
    // Of the group's request, with its bounds from 0.
    assert_eq!(p.persistent_bytes, one.persistent_bytes + two.persistent_bytes + 12);
    assert_eq!(p.workspace_bytes, one.workspace_bytes + two.workspace_bytes);
    // A part that takes any batch takes drafts as decodes; one that takes decodes of one token leaves them to the other.
    assert_eq!(plan("MARK_1+MARK_2", 3)?.reorder_batch_threshold, Some(4));
    let p = plan("MARK_2+MARK_1", 3)?;
    let single = GraphSupport::UniformSingleTokenDecode;
    assert_eq!((p.graph_support, p.reorder_batch_threshold), (single, Some(1)));
    Ok(())
}

#[test]
fn a_graph_of_decodes_is_the_parts_own() -> Result<()> {
    use headway_tensor::Persistent;
    use std::sync::Arc;
    let cx = SimExec::default();
    let mut r = registry();
    r.register::<SimMark>()?;
    let info = GroupInfo { max_num_reqs: 4, max_num_tokens: 16, ..GroupInfo::new(marked::spec(), 1) };
    let backend = r.get("SIM_ATTN+MARK_2")?;
    let config = backend.parse_config(None)?;
    let mut groups = vec![AttentionGroup::new(&*backend, &cx, 0, info, &config, 1, None)?];
    assert_eq!(groups[0].plan().graph_support, GraphSupport::UniformSingleTokenDecode);
    let (mut starts, mut lens) = (Persistent::new(&cx, 5)?, Persistent::new(&cx, 4)?);
    let (mut table, mut slots) = (Persistent::new(&cx, 8)?, Persistent::new(&cx, 16)?);
    let mut step_of = |bounds: &[i32], len: i32| -> Result<CommonAttentionMetadata> {
        let n = bounds.len() - 1;
        let q = starts.write_dual(&cx, n + 1, |o| o.copy_from_slice(bounds));
        let inputs = StepInputs::new(q, lens.write(&cx, n, |o| o.fill(len)), vec![len; n])?;
        let t = table.write_dual(&cx, 2 * n, |o| o.fill(1));
        let tokens = inputs.num_actual_tokens;
        CommonAttentionMetadata::new(Arc::new(inputs), t, 2, slots.write(&cx, tokens, |o| o.fill(0)))
    };
    let mut step = StepMetadata::new(vec![0u16].into());
    let mut frozen = |bounds: &[i32], len, capture| -> Result<u64> {
        step.clear();
        build_step(&mut groups, &cx, &[step_of(bounds, len)?], 0, capture, &mut step)?;
        Ok(step.entries()[0].frozen())
    };
    let captured = frozen(&[0, 1, 2], 5, true)?;
    assert_eq!(frozen(&[0, 1, 2], 9, false)?, captured);
    // Prefills between do not move what decodes read; nothing else is taken for the graph's batch.
    assert_ne!(frozen(&[0, 1, 4], 9, false)?, captured);
    assert_ne!(frozen(&[0, 3, 7], 9, false)?, captured);
    assert_eq!(frozen(&[0, 1, 2], 7, false)?, captured);
    assert_ne!(frozen(&[0, 1, 2], 640, false)?, captured);
    for bounds in [[0, 1, 4], [0, 3, 6]] {
        let e = frozen(&bounds, 9, true).unwrap_err().to_string();
        assert!(e.contains("SIM_ATTN+MARK_2") && e.contains("more than 1 new tokens"), "{e}");
    }
    Ok(())
}
