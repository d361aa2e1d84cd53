//! What is checked in one cell, one function a promise of the contract.

use super::{
    batch::{K_SCALE, Req, Step, V_SCALE, World, requests},
    cell::{Cell, Phase},
    fixture::{Fixture, MARKER, Output, Tools},
};
use crate::{reference::round::through_cache, rng::Rng, tolerance::Tolerance};
use headway_tensor::DType;

/// Bytes that no kernel may read or that hold NaN in every float type.
const POISON_NAN: u8 = 0xff;
/// Bytes that are a large finite number in every float type.
const POISON_LARGE: u8 = 0x7b;

/// Least cosine where probabilities are rounded to 8 bits: that of an answer and one that is off, across it, by a sixteenth
/// of its length.
const LEAST_COSINE: f64 = 0.998;

/// A promise that was not kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Broken {
    /// Which promise, in a few words.
    pub check: &'static str,
    /// What happened instead.
    pub what: String,
}

type Outcome<T = ()> = Result<T, Broken>;

fn broken<T>(check: &'static str, what: impl ToString) -> Outcome<T> {
    Err(Broken { check, what: what.to_string() })
}

fn ok<T>(check: &'static str, r: headway_attention::Result<T>) -> Outcome<T> {
    r.or_else(|e| broken(check, format!("error: {e}")))
}

/// The batch of a cell.
pub fn world(cell: &Cell, seed: u64, only: Option<&[Req]>) -> World {
    let mut rng = Rng::new(seed);
    let reqs = requests(cell, &mut rng);
    World::new(cell, only.map_or(reqs, <[Req]>::to_vec), rng)
}

/// Runs every check on a cell; the names of those that ran.
///
/// # Errors
/// The first promise that was broken.
pub fn run(tools: Tools<'_>, cell: &Cell, seed: u64, only: Option<&[Req]>) -> Outcome<Vec<&'static str>> {
    let mut world = world(cell, seed, only);
    world.rounds_expanded = tools.host.rounds_expanded();
    let parts = tools.backend.parts().map(|parts| parts.map(|p| p.rules().name.clone()));
    let parts = parts.unwrap_or_else(|| [(); 2].map(|()| tools.backend.rules().name.clone()));
    world.attends_in = parts.map(|name| tools.host.attends_in(&name, cell));
    let mut fixture = ok("a yes of the rule book sets up", Fixture::new(tools, &world, POISON_NAN))?;
    let mut ran = vec![];
    let context = world.context_step();
    if let Some(context) = &context {
        numbers(&mut fixture, &world, context, "the context step's numbers")?;
        ran.push("context step");
    }
    let main = world.main_step();
    let before = ok("cache", fixture.cache_bytes())?;
    let out = numbers(&mut fixture, &world, &main, "the step's numbers")?;
    ran.push("numbers");
    foreign_bytes(&fixture, &world, POISON_NAN)?;
    ran.push("null block, unused blocks and other layers' pages untouched");
    padding(&out)?;
    ran.push("padding rows zero, rows past the step untouched");
    let after = ok("cache", fixture.cache_bytes())?;
    skipped_slots(&mut fixture, &main, &after, &out)?;
    ran.push("slot −1 skipped");
    shared_layer(&mut fixture, &main, &after, &out)?;
    ran.push("shared layer does not write");
    profile(&mut fixture, &main, &after)?;
    ran.push("profile run fills zeros");
    fresh_builder(&mut fixture, &mut world, &main, &before, &out)?;
    ran.push("a reused builder equals a fresh one");
    other_poison(tools, &world, context.as_ref(), &main, &out)?;
    ran.push("bit-equal under any poison");
    if tools.backend.updates_block_table() {
        swapped_table(&mut fixture, &main, &out)?;
        ran.push("a swapped block table equals a fresh build");
    }
    if cell.batch_invariant {
        alone(&mut fixture, &mut world, &main, &out)?;
        ran.push("bit-equal alone and in the batch");
    }
    let eight_bits = matches!(cell.kv_element(), Some(DType::F8E4M3 | DType::F8E5M2));
    if eight_bits && cell.phase == Phase::Decode && cell.latent.is_none() {
        cache_edges(tools, cell, seed)?;
        ran.push("8-bit cache saturates and keeps NaN");
    }
    Ok(ran)
}

fn numbers(fixture: &mut Fixture<'_>, world: &World, step: &Step, check: &'static str) -> Outcome<Output> {
    let out = ok(check, fixture.run(step, false))?;
    let (want, slack) = (world.answer(step, out.decodes), world.slack(step, out.decodes));
    match tolerance(world).compare_within(&out.live, &want, &slack) {
        Ok(_) => Ok(out),
        Err(e) => broken(check, format!("{e}{}", whose(world, step, &out.live, &want, &slack))),
    }
}

/// How near an answer must be, beside the slack of each element.
fn tolerance(world: &World) -> Tolerance {
    let of = Tolerance::of(world.cell.dtype);
    match world.attends_in {
        [None, None] => of,
        _ => Tolerance { cosine: LEAST_COSINE, ..of },
    }
}

/// The first request whose rows are off.
fn whose(world: &World, step: &Step, got: &[f64], want: &[f64], slack: &[f64]) -> String {
    let head_size = world.cell.out_head();
    let width = world.cell.num_heads * head_size;
    let tolerance = tolerance(world);
    for (r, w) in step.query_start_loc.windows(2).enumerate() {
        let rows = w[0] as usize * width..w[1] as usize * width;
        let (Some(g), Some(a)) = (got.get(rows.clone()), want.get(rows.clone())) else { continue };
        let more = slack.get(rows).unwrap_or(&[]);
        for (n, (g, a)) in g.chunks(head_size).zip(a.chunks(head_size)).enumerate() {
            let more = more.get(n * head_size..(n + 1) * head_size).unwrap_or(&[]);
            if tolerance.compare_within(g, a, more).is_err() {
                let (row, head) = (n / world.cell.num_heads, n % world.cell.num_heads);
                let Req { q_len, kv_len, causal } = step.reqs[r];
                return format!(
                    "; first in request {r} (q_len {q_len}, kv_len {kv_len}, causal {causal}), row {row}, head {head}"
                );
            }
        }
    }
    String::new()
}

fn same_bits(a: &[f64], b: &[f64]) -> Option<usize> {
    if a.len() != b.len() {
        return Some(a.len().min(b.len()));
    }
    a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits())
}

fn equal(check: &'static str, got: &Output, was: &Output) -> Outcome {
    match same_bits(&got.live, &was.live) {
        None => Ok(()),
        Some(i) => {
            let at = |o: &Output| o.live.get(i).copied().unwrap_or(f64::NAN);
            broken(check, format!("element {i} is {}, was {}", at(got), at(was)))
        }
    }
}

fn padding(out: &Output) -> Outcome {
    if let Some(x) = out.padding.iter().find(|x| **x != 0.0) {
        return broken("rows of padding tokens are zero-filled", format!("found {x}"));
    }
    match out.guard.iter().find(|x| **x != f64::from(MARKER)) {
        Some(x) => broken("rows past the step are left alone", format!("found {x}")),
        None => Ok(()),
    }
}

/// Bytes that belong to the null block, to no request, or to another layer.
fn foreign_bytes(fixture: &Fixture<'_>, world: &World, poison: u8) -> Outcome {
    let check = "null block, unused blocks and other layers' pages are left alone";
    let bytes = ok(check, fixture.cache_bytes())?;
    let factor = world.cell.block_size / world.cell.kernel_block_size;
    let mut foreign = vec![false; world.num_blocks];
    world.unused_blocks.iter().for_each(|&b| foreign[b] = true);
    let place = fixture.place();
    let changed = bytes.iter().enumerate().find(|(at, byte)| {
        **byte != poison && place.page_of(*at, factor).is_none_or(|b| foreign.get(b).is_none_or(|f| *f))
    });
    match changed {
        None => Ok(()),
        Some((at, _)) => match place.page_of(at, factor) {
            Some(b) => broken(check, format!("byte {at}, in block {b}, was written")),
            None => broken(check, format!("byte {at}, between this layer's pages, was written")),
        },
    }
}

fn unchanged(fixture: &Fixture<'_>, before: &[u8], check: &'static str) -> Outcome {
    let after = ok(check, fixture.cache_bytes())?;
    match after.iter().zip(before).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => broken(check, format!("byte {at} of the cache was written")),
    }
}

/// Whether every row saw the cache alone: prefills of latent attention see their new tokens as they were.
fn all_from_cache(fixture: &Fixture<'_>, main: &Step, out: &Output) -> bool {
    !fixture.is_latent() || main.reqs[out.decodes..].iter().all(|r| r.q_len == 0)
}

/// Keys and values other than those in the cache, with nowhere to go: the answer is the cache's.
fn skipped_slots(fixture: &mut Fixture<'_>, main: &Step, cache: &[u8], out: &Output) -> Outcome {
    let check = "slot −1 is skipped, and keys and values come from the cache";
    let mut step = main.clone();
    step.slots.fill(-1);
    if !all_from_cache(fixture, main, out) {
        let again = ok(check, fixture.run(&step, false))?;
        unchanged(fixture, cache, check)?;
        return equal(check, &again, out);
    }
    let live_k = step.k.len() / step.slots.len().max(1) * main.live_tokens();
    let live_v = step.v.len() / step.slots.len().max(1) * main.live_tokens();
    step.k[..live_k].fill(0.75);
    step.v[..live_v].fill(-3.0);
    let again = ok(check, fixture.run(&step, false))?;
    unchanged(fixture, cache, check)?;
    equal(check, &again, out)
}

fn shared_layer(fixture: &mut Fixture<'_>, main: &Step, cache: &[u8], out: &Output) -> Outcome {
    let check = "a layer that shares a cache does not write it";
    let mut step = main.clone();
    if !all_from_cache(fixture, main, out) {
        let again = ok(check, fixture.run(&step, true))?;
        unchanged(fixture, cache, check)?;
        return equal(check, &again, out);
    }
    step.k.iter_mut().chain(&mut step.v).for_each(|x| *x = -*x);
    let again = ok(check, fixture.run(&step, true))?;
    unchanged(fixture, cache, check)?;
    equal(check, &again, out)
}

fn profile(fixture: &mut Fixture<'_>, main: &Step, cache: &[u8]) -> Outcome {
    let check = "without metadata the output is zeros and the cache untouched";
    let out = ok(check, fixture.profile_run(main))?;
    unchanged(fixture, cache, check)?;
    if let Some(x) = out.live.iter().chain(&out.padding).find(|x| **x != 0.0) {
        return broken(check, format!("found {x}"));
    }
    padding(&out)
}

/// The builder has served several steps by now; a new one must give the same, for the whole batch and
/// for the shortest request alone.
fn fresh_builder(
    fixture: &mut Fixture<'_>,
    world: &mut World,
    main: &Step,
    before: &[u8],
    out: &Output,
) -> Outcome {
    let check = "a builder that served other steps gives what a fresh one gives";
    let asking = (0..world.reqs.len()).filter(|&r| world.reqs[r].q_len > 0);
    let short = asking.min_by_key(|&r| world.reqs[r].kv_len).map(|r| world.alone(main, r));
    let small = short.as_ref().map(|s| ok(check, fixture.run(s, false))).transpose()?;
    ok(check, fixture.renew_builder())?;
    ok(check, fixture.set_cache(before))?;
    equal(check, &ok(check, fixture.run(main, false))?, out)?;
    ok(check, fixture.renew_builder())?;
    match (short, small) {
        (Some(step), Some(small)) => equal(check, &ok(check, fixture.run(&step, false))?, &small),
        _ => Ok(()),
    }
}

fn other_poison(
    tools: Tools<'_>,
    world: &World,
    context: Option<&Step>,
    main: &Step,
    out: &Output,
) -> Outcome {
    let check = "unwritten slots and the null block have no influence";
    let mut fixture = ok(check, Fixture::new(tools, world, POISON_LARGE))?;
    if let Some(context) = context {
        ok(check, fixture.run(context, false))?;
    }
    let again = ok(check, fixture.run(main, false))?;
    foreign_bytes(&fixture, world, POISON_LARGE)?;
    equal(check, &again, out)
}

fn swapped_table(fixture: &mut Fixture<'_>, main: &Step, out: &Output) -> Outcome {
    let check = "metadata with a swapped block table equals a fresh build";
    let other: Vec<i32> = main.block_table.iter().map(|&b| i32::from(b != 0)).collect();
    let again = ok(check, fixture.run_with_swapped_table(main, &other))?;
    equal(check, &again, out)
}

/// Each request by itself, with the rows and the cache that it had in the batch.
fn alone(fixture: &mut Fixture<'_>, world: &mut World, main: &Step, out: &Output) -> Outcome {
    let check = "a request's answer is bitwise the same alone and in the batch";
    let width = world.cell.num_heads * world.cell.out_head();
    for request in 0..world.reqs.len() {
        let step = world.alone(main, request);
        let one = ok(check, fixture.run(&step, false))?;
        let from = main.query_start_loc[request] as usize * width;
        let n = one.live.len();
        if let Some(i) = same_bits(&one.live, &out.live[from..from + n]) {
            let Req { q_len, kv_len, .. } = world.reqs[request];
            return broken(
                check,
                format!(
                    "request {request} (q_len {q_len}, kv_len {kv_len}): element {i} is {} alone, {} in the batch",
                    one.live[i],
                    out.live[from + i]
                ),
            );
        }
    }
    Ok(())
}

/// One token a request, so that the output is the value as the cache holds it.
fn cache_edges(tools: Tools<'_>, cell: &Cell, seed: u64) -> Outcome {
    let check = "an 8-bit cache saturates finite and infinite values and keeps NaN";
    let kv = cell.kv_element().unwrap_or(DType::F32);
    let plain = Cell { features: Default::default(), ..cell.clone() };
    let req = Req { q_len: 1, kv_len: 1, causal: true };
    let mut world = world(&plain, seed, Some(&[req]));
    let mut step = world.main_step();
    step.k.iter_mut().for_each(|x| *x = if x.is_nan() { *x } else { 0.0 });
    let edges =
        [447.0, 448.0, 464.0, 465.0, 1000.0, 57344.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -0.0];
    let tiny = [2f32.powi(-9), 2f32.powi(-10), 2f32.powi(-16), -2f32.powi(-17), 0.0, -1.0, 17.0];
    let narrow = |x: f32| crate::reference::round::round_to(cell.dtype, x);
    let values: Vec<f32> =
        edges.iter().map(|x| x * V_SCALE).chain(tiny.map(|x| x * V_SCALE)).map(narrow).collect();
    let width = cell.num_kv_heads * cell.head_size_v;
    for start in (0..values.len()).step_by(width) {
        for (i, v) in step.v[..width].iter_mut().enumerate() {
            *v = values[(start + i) % values.len()];
        }
        let mut fixture = ok(check, Fixture::new(tools, &world, POISON_NAN))?;
        let out = ok(check, fixture.run(&step, false))?;
        let group = cell.num_heads / cell.num_kv_heads;
        let want: Vec<f64> = (0..cell.num_heads * cell.head_size_v)
            .map(|i| step.v[i / cell.head_size_v / group * cell.head_size_v + i % cell.head_size_v])
            .map(|v| f64::from(narrow(through_cache(kv, V_SCALE, v) as f32)))
            .collect();
        let exact = Tolerance { abs: 0.0, rel: 1e-6, cosine: -1.0 };
        if let Err(e) = exact.compare(&out.live, &want) {
            return broken(check, format!("{e} (k scale {K_SCALE}, v scale {V_SCALE})"));
        }
    }
    Ok(())
}
