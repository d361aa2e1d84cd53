//! The table of the step loop: builder calls and their reuse, derived lengths, the order of a batch. The
//! builders are stand-ins that record what they are given.

use crate::{
    Outcome,
    differences::Why,
    read::{Table, all, flag, flat, ints, num, nums, opt, same, spec, starts, text},
};
use headway_attention::{
    group::{graph::varlen_blocker, plan::attention_groups::share},
    process::rules::KernelBlockSize,
    step::batch::sort_batch,
    *,
};
use headway_tensor::{Device, DeviceMem, Dual, Exec, TensorMut, View};
use serde_json::Value;
use std::{cell::RefCell, sync::Arc};

pub fn runner_build(_: &str, i: &Value, e: &Value, _: &Table) -> Outcome {
    match text(&i["op"]) {
        "build_attn_metadata" => build(i, e),
        "common_metadata_helpers" => helpers(i, e),
        "sort_batch" => same(
            "order",
            sort_batch(&nums(&i["num_tokens"]), &nums(&i["num_draft_tokens"]), num(&i["decode_query_len"])),
            nums(&e["order"]),
        ),
        other => Outcome::NotUnderstood(other.into()),
    }
}

/// What a builder was called with.
#[derive(Clone)]
struct Call {
    method: &'static str,
    from: Option<usize>,
    common: CommonAttentionMetadata,
}

/// Records the calls of a step.
#[derive(Default)]
struct Recorder(RefCell<Vec<Call>>);

impl Recorder {
    fn record(&self, method: &'static str, from: Option<usize>, common: &CommonAttentionMetadata) -> usize {
        let mut calls = self.0.borrow_mut();
        calls.push(Call { method, from, common: common.clone() });
        calls.len() - 1
    }
}

impl Exec for Recorder {
    fn device(&self) -> Device {
        Device { kind: "cpu", index: 0 }
    }
    fn alloc(&self, _: usize) -> headway_tensor::Result<Option<Arc<dyn DeviceMem>>> {
        Ok(None)
    }
    fn upload(&self, _: &Arc<dyn DeviceMem>, _: usize, _: &[u8]) {}
}

/// A builder that swaps block tables, or doesn't. Its metadata is the number of its call.
struct Stand<const SWAPS: bool>;

/// A call, and the call that built afresh what it reuses.
#[derive(Clone, Copy)]
struct Numbers {
    fresh: usize,
}

impl<const SWAPS: bool> MetadataBuilder for Stand<SWAPS> {
    type Exec = Recorder;
    type Config = ();
    type Metadata = Numbers;
    const UPDATES_BLOCK_TABLE: bool = SWAPS;
    fn new(_: &Recorder, _: &GroupInfo, _: &BuilderPlan, _: &()) -> Result<Self> {
        Ok(Self)
    }
    fn build(&mut self, cx: &Recorder, common: &CommonAttentionMetadata) -> Result<Numbers> {
        Ok(Numbers { fresh: cx.record("build", None, common) })
    }
    fn build_for_capture(&mut self, cx: &Recorder, common: &CommonAttentionMetadata) -> Result<Numbers> {
        Ok(Numbers { fresh: cx.record("build_for_cudagraph_capture", None, common) })
    }
    fn update_block_table(
        &mut self,
        cx: &Recorder,
        first: &Numbers,
        common: &CommonAttentionMetadata,
    ) -> Result<Numbers> {
        cx.record("update_block_table", Some(first.fresh), common);
        Ok(*first)
    }
}

struct NoLayer;

impl LayerImpl for NoLayer {
    type Exec = Recorder;
    type Config = ();
    type Metadata = Numbers;
}

impl AttentionImpl for NoLayer {
    fn new(_: &AttentionArgs<'_>, _: &()) -> Result<Self> {
        Ok(Self)
    }
    fn update_kv_cache(&self, _: &Recorder, _: &Qkv<'_>, _: &mut KvMut<'_>, _: &View<i64>) -> Result<()> {
        Ok(())
    }
    fn forward(
        &self,
        _: &Recorder,
        _: &Qkv<'_>,
        _: &mut KvMut<'_>,
        _: &Numbers,
        _: TensorMut<'_>,
    ) -> Result<()> {
        Ok(())
    }
}

struct Backend<const INDEX: usize, const SWAPS: bool>;

impl<const INDEX: usize, const SWAPS: bool> AttentionBackend for Backend<INDEX, SWAPS> {
    const CONTRACT: u32 = 1;
    type Exec = Recorder;
    type Kind = Standard;
    type Config = ();
    type Builder = Stand<SWAPS>;
    type Impl = NoLayer;
    fn rules() -> RuleBook {
        RuleBook {
            name: format!("BUILDER_{INDEX}_{SWAPS}").into(),
            kernel_block_sizes: vec![KernelBlockSize::MultipleOf(1)],
            ..RuleBook::default()
        }
    }
}

fn backends() -> Result<Registry> {
    let mut r = Registry::default();
    r.register::<Backend<0, false>>()?;
    r.register::<Backend<0, true>>()?;
    r.register::<Backend<1, false>>()?;
    r.register::<Backend<1, true>>()?;
    r.register::<Backend<2, false>>()?;
    r.register::<Backend<2, true>>()?;
    Ok(r)
}

/// A group of the case: its plan, and the names of its layers.
struct Group<'a> {
    plan: AttentionGroupPlan,
    index: usize,
    builder: &'a Value,
    layers: Vec<&'a str>,
}

fn groups<'a>(i: &'a Value, registry: &Registry) -> Option<Vec<Group<'a>>> {
    let mut out: Vec<Group<'_>> = vec![];
    let mut layer = 0u32;
    for (kv_cache_group, g) in i["kv_cache_groups"].as_array()?.iter().enumerate() {
        for (index, a) in g["attention_groups"].as_array()?.iter().enumerate() {
            let at = num(&a["builder"]);
            let builder = &i["builders"][at];
            let name = format!("BUILDER_{at}_{}", flag(&builder["supports_update_block_table"]));
            let layers: Vec<&str> = a["layer_names"].as_array()?.iter().map(text).collect();
            let spec = spec(&a["spec"])?;
            let kernel_block_size = opt(&a["kernel_block_size"]).unwrap_or(spec.block_size());
            let ids = layers.iter().map(|_| {
                layer += 1;
                AttnLayer(layer - 1)
            });
            let info = GroupInfo {
                kernel_block_size,
                layers: ids.collect(),
                max_num_reqs: 64,
                max_model_len: 4096,
                ..GroupInfo::new(spec, 1)
            };
            let backend = registry.get(&name).ok()?;
            let plan = AttentionGroupPlan { kv_cache_group, backend, info, shares_with: None };
            out.push(Group { plan, index, builder, layers });
        }
    }
    Some(out)
}

fn commons(i: &Value) -> Option<Vec<CommonAttentionMetadata>> {
    let lens = ints(&i["seq_lens"]);
    let mut inputs =
        StepInputs::new(Dual::from_vec(starts(&i["query_lens"])), View::from_vec(lens.clone()), lens).ok()?;
    inputs.num_actual_tokens = num(&i["num_tokens"]);
    inputs.max_query_len = num(&i["max_query_len"]);
    inputs.max_seq_len = num(&i["max_seq_len"]);
    inputs.dcp_local_seq_lens =
        i["dcp_local_seq_lens"].as_array().map(|_| View::from_vec(ints(&i["dcp_local_seq_lens"])));
    let by_group = i["causal"].as_object();
    inputs.causal = step::common::Causal::All(i["causal"].as_bool().unwrap_or(true));
    let inputs = Arc::new(inputs);
    let one = |(n, g): (usize, &Value)| {
        let stride = g["block_table"][0].as_array().map_or(0, Vec::len);
        let slots = flat(&g["slot_mapping"]).into_iter().map(i64::from).collect();
        let table = Dual::from_vec(flat(&g["block_table"]));
        let mut c =
            CommonAttentionMetadata::new(inputs.clone(), table, stride, View::from_vec(slots)).ok()?;
        c.causal_override = by_group
            .and_then(|m| m.get(&n.to_string()))
            .and_then(Value::as_bool)
            .map(step::common::Causal::All);
        Some(c)
    };
    i["kv_cache_groups"].as_array()?.iter().enumerate().map(one).collect()
}

fn same_call(ours: &Call, theirs: &Value, i: &Value, group: &Group<'_>, reused: Option<usize>) -> Outcome {
    let c = &ours.common;
    let table = same("block table", c.block_table.host().to_vec(), flat(&theirs["block_table"]));
    let slots = c.slot_mapping.host().unwrap_or(&[]).iter().map(|s| *s as i32).collect::<Vec<_>>();
    let place = all([
        same("kv cache group", group.plan.kv_cache_group, num(&theirs["kv_cache_group"])),
        same("attention group", group.index, num(&theirs["attention_group"])),
        same("micro-batch", num(&i["ubatch_idx"]), num(&theirs["ubatch"])),
        same("slots", slots, flat(&theirs["slot_mapping"])),
        table,
    ]);
    if ours.method != text(&theirs["method"]) {
        let attention = group.plan.info.spec.attention().is_some();
        let shares = ours.method == "update_block_table" && attention;
        let why = format!("{}, expected {}", ours.method, theirs["method"]);
        return all([
            place,
            if shares { Outcome::Deliberate(Why::AllKindsShare) } else { Outcome::Differs(why) },
        ]);
    }
    if ours.method == "update_block_table" {
        return all([place, same("reuses", reused, opt(&theirs["from_call"]))]);
    }
    let x = &c.inputs;
    let lens = |v: &View<i32>| v.host().map(<[i32]>::to_vec);
    let local = x.dcp_local_seq_lens.as_ref().and_then(lens);
    let bound = &theirs["seq_lens_cpu_upper_bound"];
    all([
        place,
        same("requests", x.num_reqs, num(&theirs["num_reqs"])),
        same("tokens", x.num_actual_tokens, num(&theirs["num_actual_tokens"])),
        same("max_query_len", x.max_query_len, num(&theirs["max_query_len"])),
        same("max_seq_len", x.max_seq_len, num(&theirs["max_seq_len"])),
        same("query_start_loc", x.query_start_loc.host().to_vec(), ints(&theirs["query_start_loc"])),
        same("seq_lens", lens(&x.seq_lens), Some(ints(&theirs["seq_lens"]))),
        same("causal", c.causal().of(0), flag(&theirs["causal"])),
        same(
            "local lengths",
            local,
            theirs["dcp_local_seq_lens"].as_array().map(|_| ints(&theirs["dcp_local_seq_lens"])),
        ),
        // Here the bound always exists.
        if bound.is_null() {
            Outcome::Same
        } else {
            same("bound", x.seq_lens_upper_bound.clone(), ints(bound))
        },
    ])
}

fn build(i: &Value, e: &Value) -> Outcome {
    let Ok(registry) = backends() else { return Outcome::NotUnderstood("the stand-ins".into()) };
    let (Some(mut planned), Some(commons)) = (groups(i, &registry), commons(i)) else {
        return Outcome::NotUnderstood("the groups".into());
    };
    let mut plans: Vec<AttentionGroupPlan> = planned.iter().map(|g| g.plan.clone()).collect();
    share(&mut plans);
    planned.iter_mut().zip(plans).for_each(|(g, p)| g.plan = p);
    let cx = Recorder::default();
    let of_layer: Vec<u16> =
        planned.iter().enumerate().flat_map(|(n, g)| g.layers.iter().map(move |_| n as u16)).collect();
    let mut step = StepMetadata::new(of_layer.into());
    let built = planned
        .iter()
        .map(|g| {
            AttentionGroup::from_plan(
                &g.plan,
                &cx,
                &g.plan.backend.parse_config(None)?,
                num(&i["num_ubatches"]),
            )
        })
        .collect::<Result<Vec<_>>>()
        .and_then(|mut groups| {
            build_step(
                &mut groups,
                &cx,
                &commons,
                num(&i["ubatch_idx"]),
                flag(&i["for_cudagraph_capture"]),
                &mut step,
            )
        });
    if let Err(x) = built {
        return Outcome::Differs(x.to_string());
    }
    let calls = cx.0.borrow();
    let empty = vec![];
    let theirs = e["calls"].as_array().unwrap_or(&empty);
    let mut outcomes = vec![same("calls", calls.len(), theirs.len())];
    for ((ours, t), g) in calls.iter().zip(theirs).zip(&planned) {
        outcomes.push(same_call(ours, t, i, g, ours.from));
    }
    for (n, g) in planned.iter().enumerate() {
        outcomes
            .extend(g.layers.iter().map(|l| same("call of a layer", Some(n), opt(&e["layer_to_call"][*l]))));
    }
    outcomes.push(answers(i, e, &planned));
    all(outcomes)
}

/// What the groups together can and can't.
fn answers(i: &Value, e: &Value, groups: &[Group<'_>]) -> Outcome {
    let checked = &i["checked_layers"];
    let counts = |g: &&Group<'_>| {
        checked.as_array().is_none_or(|c| g.layers.iter().any(|l| c.iter().any(|x| text(x) == *l)))
    };
    let checked: Vec<&Group<'_>> = groups.iter().filter(counts).collect();
    let name = |g: &Group<'_>| g.builder["backend"].as_str().unwrap_or("").to_owned();
    let names: Vec<String> = checked.iter().map(|g| name(g)).collect();
    let support =
        |g: &Group<'_>| serde_json::from_value::<GraphSupport>(g.builder["cudagraph_support"].clone());
    let supports: Option<Vec<_>> = checked.iter().map(|g| support(g).ok()).collect();
    let Some(supports) = supports else { return Outcome::NotUnderstood("a graph support".into()) };
    let (weakest, backend) =
        GraphSupport::weakest(names.iter().map(String::as_str).zip(supports.iter().copied()));
    let bounds = checked.iter().map(|g| opt(&g.builder["varlen_cudagraph_max_query_len"]));
    let each = names.iter().zip(supports.iter().zip(bounds)).map(|(n, (s, b))| (n.as_str(), *s, b));
    let blocker = varlen_blocker(each, num(&i["varlen_query_len"]));
    let blocked = &e["varlen_unsupported"];
    let exact = checked
        .iter()
        .zip(&names)
        .find(|(g, _)| !flag(&g.builder["supports_device_cpu_query_lens_mismatch"]));
    all([
        same("weakest", weakest.name(), text(&e["min_cg_support"])),
        same("its backend", backend, e["min_cg_attn_backend"].as_str()),
        same("mixed decodes blocked by", blocker.map(|b| b.0), blocked["backend"].as_str()),
        same("at", blocker.and_then(|b| b.1), opt(&blocked["bound"])),
        same(
            "exact lengths for",
            exact.map(|(_, n)| n.as_str()),
            e["query_lens_mismatch_unsupported"].as_str(),
        ),
    ])
}

fn helpers(i: &Value, e: &Value) -> Outcome {
    let lens = ints(&i["seq_lens"]);
    let inputs =
        StepInputs::new(Dual::from_vec(starts(&i["query_lens"])), View::from_vec(lens.clone()), lens);
    let Ok(mut inputs) = inputs else { return Outcome::NotUnderstood("the batch".into()) };
    inputs.num_actual_tokens = num(&i["num_actual_tokens"]);
    let stride = i["block_table"][0].as_array().map_or(0, Vec::len);
    let slots = flat(&i["slot_mapping"]).into_iter().map(i64::from).collect();
    let table = Dual::from_vec(flat(&i["block_table"]));
    let cut = &i["unpad_to"];
    let common = CommonAttentionMetadata::new(Arc::new(inputs), table, stride, View::from_vec(slots));
    let both =
        common.and_then(|c| Ok((c.unpadded(num(&cut["num_reqs"]), num(&cut["num_actual_tokens"]))?, c)));
    let (u, c) = match both {
        Ok(x) => x,
        Err(x) => return Outcome::Differs(x.to_string()),
    };
    let (x, t) = (&c.inputs, &e["unpadded"]);
    let query_lens: Vec<usize> = (0..x.num_reqs).map(|r| x.query_len(r)).collect();
    all([
        same("batch size", x.num_reqs, num(&e["batch_size"])),
        same("query lens", query_lens, nums(&e["naive_query_lens"])),
        same("computed", x.num_computed_tokens().to_vec(), ints(&e["num_computed_tokens"])),
        same("token to request", x.token_to_req().to_vec(), ints(&e["token_to_req_indices"])),
        same("requests", u.inputs.num_reqs, num(&t["num_reqs"])),
        same("tokens", u.inputs.num_actual_tokens, num(&t["num_actual_tokens"])),
        same("query_start_loc", u.inputs.query_start_loc.host().to_vec(), ints(&t["query_start_loc"])),
        same("seq_lens", u.inputs.seq_lens.host().map(<[i32]>::to_vec), Some(ints(&t["seq_lens"]))),
        same("max_query_len", u.inputs.max_query_len, num(&t["max_query_len"])),
        same("max_seq_len", u.inputs.max_seq_len, num(&t["max_seq_len"])),
        same("block table", u.block_table.host().to_vec(), flat(&t["block_table"])),
        same(
            "slots",
            u.slot_mapping.host().map(|s| s.iter().map(|x| *x as i32).collect::<Vec<_>>()),
            Some(flat(&t["slot_mapping"])),
        ),
    ])
}
