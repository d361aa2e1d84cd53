//! Mixtures of experts.

use crate::{
    Outcome, ensure,
    reference::{Random, Worst, poisoned, read, rounded, tensor},
    text,
};
use headway_cuda::{CudaError, CudaExec};
use headway_tensor::{
    Activation, DType, ExpertBuffers, ExpertGroups, ExpertLimits, ExpertParts, Experts, ExpertsSpec,
    GroupScore, LinearPart, Ops, RouterScores, Routing, Tensor, Weight,
};
use headway_testkit::reference::experts::{self, Expert, published_rules};

const TYPES: [DType; 2] = [DType::BF16, DType::F16];
const SWIGLU: Activation = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };

/// A layer's experts with random weights, as the type holds them.
struct Layer {
    routing: Routing,
    correction: Option<Vec<f32>>,
    activation: Activation,
    hidden: usize,
    inner: usize,
    dtype: DType,
    experts: Vec<Expert>,
}

impl Layer {
    fn new(
        random: &mut Random,
        routing: Routing,
        [hidden, inner]: [usize; 2],
        dtype: DType,
        (activation, biased): (Activation, bool),
    ) -> Self {
        let mut matrix = |rows: usize, cols: usize| -> Vec<f32> {
            let values = random.values(rows * cols, 2.0 / (cols as f32).sqrt());
            values.into_iter().map(|x| rounded(x, dtype)).collect()
        };
        let mut bias = |n: usize| if biased { matrix(n, 1) } else { vec![] };
        let biases: Vec<_> = (0..routing.experts).map(|_| (bias(2 * inner), bias(hidden))).collect();
        let experts = biases
            .into_iter()
            .map(|(gate_up_bias, down_bias)| Expert {
                gate_up: matrix(2 * inner, hidden),
                gate_up_bias,
                down: matrix(hidden, inner),
                down_bias,
            })
            .collect();
        let sigmoid = routing.scores == RouterScores::Sigmoid;
        let correction = sigmoid.then(|| random.values(routing.experts, 0.3));
        Self { routing, correction, activation, hidden, inner, dtype, experts }
    }

    fn limits(&self) -> ExpertLimits {
        let Routing { experts, top_k, .. } = self.routing;
        ExpertLimits { experts, top_k, hidden: self.hidden, intermediate: self.inner }
    }

    /// Gate and up in one part or in two.
    fn spec(&self, fused: bool) -> Result<ExpertsSpec, String> {
        let part = |cols: usize, values: &[f32], bias: &[f32]| -> Result<LinearPart, String> {
            let rows = values.len() / cols;
            let weight = Weight::from_f32("w", vec![rows, cols], values).map_err(text)?;
            let bias = (!bias.is_empty()).then(|| Weight::from_f32("b", vec![rows], bias));
            Ok(LinearPart { weight, bias: bias.transpose().map_err(text)? })
        };
        let one = |e: &Expert| -> Result<ExpertParts, String> {
            let (w, b) = (&e.gate_up[..], &e.gate_up_bias[..]);
            let gate_up = match fused {
                true => vec![part(self.hidden, w, b)?],
                false => {
                    let ((gate, up), (gate_bias, up_bias)) =
                        (w.split_at(w.len() / 2), b.split_at(b.len() / 2));
                    vec![part(self.hidden, gate, gate_bias)?, part(self.hidden, up, up_bias)?]
                }
            };
            Ok(ExpertParts { gate_up, down: part(self.inner, &e.down, &e.down_bias)? })
        };
        Ok(ExpertsSpec {
            routing: self.routing,
            correction: self.correction.clone(),
            activation: self.activation,
            experts: self.experts.iter().map(one).collect::<Result<_, _>>()?,
        })
    }

    fn load(&self, cx: &CudaExec) -> Result<Box<dyn Experts>, String> {
        cx.load_experts(self.spec(self.hidden.is_multiple_of(2))?, Some(self.dtype)).map_err(text)
    }

    fn buffers(&self, cx: &CudaExec, max_tokens: usize) -> Result<Box<dyn ExpertBuffers>, String> {
        cx.expert_buffers(self.limits(), max_tokens).map_err(text)
    }

    /// Compares the rows of `found` with float64. Where another expert is nearly as good, a row is left out.
    fn compare(
        &self,
        worst: &mut Worst,
        name: &str,
        found: &[f32],
        xs: &[f32],
        logits: &[f32],
    ) -> Result<(), String> {
        let wide = |v: &[f32]| v.iter().copied().map(f64::from).collect::<Vec<_>>();
        // Half a step of the value between gate and down, relative.
        let half = if self.dtype == DType::BF16 { 2f64.powi(-9) } else { 2f64.powi(-12) };
        for (t, found) in found.chunks(self.hidden).enumerate() {
            let logits = wide(&logits[t * self.routing.experts..][..self.routing.experts]);
            let routed = experts::route(&self.routing, &logits, self.correction.as_deref());
            if routed.margin < 1e-5 {
                continue;
            }
            let x = wide(&xs[t * self.hidden..][..self.hidden]);
            let exact = experts::mixture(&routed.choices, self.activation, &self.experts, &x);
            let (mut variance, mut size) = (vec![0f64; self.hidden], vec![0f64; self.hidden]);
            for (e, weight) in &routed.choices {
                let inner = self.inner_of(&self.experts[*e], &x);
                for (o, row) in self.experts[*e].down.chunks(self.inner).enumerate() {
                    for (w, v) in row.iter().zip(&inner) {
                        let term = weight * f64::from(*w) * v;
                        variance[o] += term * term;
                        size[o] += term.abs();
                    }
                }
            }
            for (o, (found, exact)) in found.iter().zip(&exact).enumerate() {
                let loss = 6.0 * half * variance[o].sqrt() + 1e-5 * (size[o] + 1.0);
                let name = format!("{name}, token {t}");
                worst.see(&name, &[*found], &[*exact], self.dtype, loss)?;
            }
        }
        Ok(())
    }

    /// The value between an expert's gate and down.
    fn inner_of(&self, e: &Expert, x: &[f64]) -> Vec<f64> {
        let row = |r: usize| -> f64 {
            let w = &e.gate_up[r * self.hidden..][..self.hidden];
            let sum: f64 = w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
            sum + e.gate_up_bias.get(r).copied().map_or(0.0, f64::from)
        };
        (0..self.inner).map(|i| experts::gate(self.activation, row(i), row(self.inner + i))).collect()
    }
}

/// The rules that published models use, and one of more groups than a warp has lanes.
fn rules() -> Vec<(&'static str, Routing)> {
    let groups = Some(ExpertGroups { count: 40, chosen: 35, score: GroupScore::Best });
    let many = Routing { groups, renormalize: true, ..Routing::top_k(120, 33, RouterScores::Sigmoid) };
    published_rules().into_iter().chain([("40 groups", many)]).collect()
}

/// Rows of a step on the device, and as the device has them.
struct Rows {
    x: Tensor,
    xs: Vec<f32>,
    logits: Tensor,
    ls: Vec<f32>,
}

fn rows(cx: &CudaExec, random: &mut Random, layer: &Layer, n: usize) -> Result<Rows, String> {
    let (x, xs) = tensor(cx, layer.dtype, &random.values(n * layer.hidden, 1.5), &[n, layer.hidden])?;
    let width = layer.routing.experts;
    let (logits, ls) = tensor(cx, DType::F32, &random.values(n * width, 3.0), &[n, width])?;
    Ok(Rows { x, xs, logits, ls })
}

/// Rows `first` to `first + n` through the experts.
fn run(
    cx: &CudaExec,
    layer: &Layer,
    experts: &dyn Experts,
    buffers: &mut dyn ExpertBuffers,
    rows: &Rows,
    (first, n): (usize, usize),
) -> Result<Vec<f32>, String> {
    let mut out = poisoned(cx, layer.dtype, &[n, layer.hidden])?;
    let x = rows.x.view().rows(first..first + n).map_err(text)?;
    let logits = rows.logits.view().rows(first..first + n).map_err(text)?;
    cx.mixture_of_experts(experts, x, logits, buffers, false, out.view_mut()).map_err(text)?;
    read(cx, &out)
}

pub fn rules_and_activations(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(41), Worst::default());
    let kinds = [
        (Activation::Silu, false),
        (SWIGLU, true),
        (Activation::GeluTanh, false),
        (Activation::Gelu, true),
        (Activation::Relu2, false),
    ];
    for dtype in TYPES {
        for (name, rule) in rules() {
            for kind in kinds {
                let layer = Layer::new(&mut random, rule, [64, 48], dtype, kind);
                let (experts, rows) = (layer.load(cx)?, rows(cx, &mut random, &layer, 23)?);
                let found = run(cx, &layer, &*experts, &mut *layer.buffers(cx, 23)?, &rows, (0, 23))?;
                let name = format!("{name}, {:?}, {dtype}", kind.0);
                layer.compare(&mut worst, &name, &found, &rows.xs, &rows.ls)?;
            }
        }
    }
    Ok(worst.found())
}

/// Odd widths, tiles part full, more experts than a warp has lanes, one row, and many.
pub fn shapes(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(42), Worst::default());
    let qwen = |experts, top_k| Routing {
        renormalize: true,
        ..Routing::top_k(experts, top_k, RouterScores::Softmax)
    };
    for dtype in TYPES {
        for (rule, n, sizes) in [
            (qwen(4, 2), 5, [37, 19]),
            (qwen(4, 2), 150, [37, 19]),
            (qwen(3, 2), 300, [136, 72]),
            (qwen(3, 3), 130, [200, 8]),
            (qwen(130, 8), 1, [64, 40]),
            (qwen(130, 8), 40, [72, 33]),
            (qwen(300, 2), 700, [8, 8]),
            (qwen(5, 1), 65, [1, 1]),
            (qwen(6, 2), 33, [576, 320]),
        ] {
            let layer = Layer::new(&mut random, rule, sizes, dtype, (Activation::Silu, n % 2 == 1));
            let (experts, rows) = (layer.load(cx)?, rows(cx, &mut random, &layer, n)?);
            let found = run(cx, &layer, &*experts, &mut *layer.buffers(cx, n)?, &rows, (0, n))?;
            let name = format!("{n} rows to {} of {}, {sizes:?}, {dtype}", rule.top_k, rule.experts);
            layer.compare(&mut worst, &name, &found, &rows.xs, &rows.ls)?;
        }
    }
    Ok(worst.found())
}

/// Every row to the same experts; others have none. Logits that are no numbers still choose different ones.
pub fn skewed(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(43), Worst::default());
    for dtype in TYPES {
        for (top_k, n) in [(1, 9), (1, 200), (2, 100), (3, 17)] {
            let rule = Routing::top_k(9, top_k, RouterScores::Softmax);
            let layer = Layer::new(&mut random, rule, [48, 24], dtype, (SWIGLU, true));
            let experts = layer.load(cx)?;
            for favourites in [[8, 4, 0], [0, 1, 2], [3, 8, 7]] {
                let mut rows = rows(cx, &mut random, &layer, n)?;
                for row in rows.ls.chunks_mut(9) {
                    (0..top_k).for_each(|i| row[favourites[i]] += 9.0 - i as f32);
                }
                rows.logits = tensor(cx, DType::F32, &rows.ls, &[n, 9])?.0;
                let found = run(cx, &layer, &*experts, &mut *layer.buffers(cx, n)?, &rows, (0, n))?;
                let name = format!("{n} rows to {:?}, {dtype}", &favourites[..top_k]);
                layer.compare(&mut worst, &name, &found, &rows.xs, &rows.ls)?;
            }
            // The rows beside those without a number are what they are without them.
            let mut rows = rows(cx, &mut random, &layer, n)?;
            let mut buffers = layer.buffers(cx, n)?;
            let clean = run(cx, &layer, &*experts, &mut *buffers, &rows, (0, n))?;
            rows.ls[..9].fill(f32::NAN);
            rows.logits = tensor(cx, DType::F32, &rows.ls, &[n, 9])?.0;
            let found = run(cx, &layer, &*experts, &mut *buffers, &rows, (0, n))?;
            ensure(found[48..] == clean[48..], || format!("{n} rows, {top_k}: one of NaN changes others"))?;
        }
    }
    Ok(worst.found())
}

/// A row alone, among others, and in passes of other sizes: the same bits.
pub fn a_row_is_its_own(cx: &CudaExec) -> Outcome {
    let (mut random, mut seen) = (Random(44), 0);
    for dtype in TYPES {
        for (name, rule) in rules() {
            for sizes in [[72, 40], [37, 19]] {
                let layer = Layer::new(&mut random, rule, sizes, dtype, (Activation::Silu, false));
                let (experts, rows) = (layer.load(cx)?, rows(cx, &mut random, &layer, 180)?);
                let mut buffers = layer.buffers(cx, 180)?;
                let all = run(cx, &layer, &*experts, &mut *buffers, &rows, (0, 180))?;
                let mut small = layer.buffers(cx, 7)?;
                for (first, n) in [(0, 1), (179, 1), (3, 17), (60, 64)] {
                    let expected = &all[first * sizes[0]..][..n * sizes[0]];
                    for buffers in [&mut buffers, &mut small] {
                        let found = run(cx, &layer, &*experts, &mut **buffers, &rows, (first, n))?;
                        ensure(found == expected, || {
                            format!("{name} {sizes:?} {dtype}: {n} rows from {first}")
                        })?;
                        seen += n;
                    }
                }
            }
        }
    }
    Ok(format!("{seen} rows the same"))
}

/// Rows that are parts of wider ones, on top of what is there.
pub fn accumulated_in_columns(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(45), Worst::default());
    for dtype in TYPES {
        for (hidden, off) in [(64, 8), (64, 3), (40, 8)] {
            let layer = Layer::new(&mut random, rules()[0].1, [hidden, 24], dtype, (Activation::Silu, false));
            let (experts, n, wide) = (layer.load(cx)?, 21, hidden + 16);
            let (x, xs) = tensor(cx, dtype, &random.values(n * wide, 1.0), &[n, wide])?;
            let (logits, ls) = tensor(cx, DType::F32, &random.values(n * 8, 2.0), &[n, 8])?;
            let (mut out, before) = tensor(cx, dtype, &random.values(n * wide, 1.0), &[n, wide])?;
            let columns = |v: &[f32]| -> Vec<f32> {
                v.chunks(wide).flat_map(|r| &r[off..off + hidden]).copied().collect()
            };
            let mut alone = poisoned(cx, dtype, &[n, hidden])?;
            let mut buffers = layer.buffers(cx, n)?;
            let view = || x.view().cols(off..off + hidden).map_err(text);
            cx.mixture_of_experts(&*experts, view()?, logits.view(), &mut *buffers, false, alone.view_mut())
                .map_err(text)?;
            layer.compare(
                &mut worst,
                &format!("columns of {dtype}"),
                &read(cx, &alone)?,
                &columns(&xs),
                &ls,
            )?;
            let to = out.view_mut().cols(off..off + hidden).map_err(text)?;
            cx.mixture_of_experts(&*experts, view()?, logits.view(), &mut *buffers, true, to)
                .map_err(text)?;
            let (alone, found) = (read(cx, &alone)?, read(cx, &out)?);
            for (t, (found, before)) in found.chunks(wide).zip(before.chunks(wide)).enumerate() {
                for (i, (f, b)) in found.iter().zip(before).enumerate() {
                    let inside = (off..off + hidden).contains(&i);
                    let a = if inside { alone[t * hidden + i - off] } else { 0.0 };
                    // The sum is rounded once, what was alone was rounded too.
                    let far = (f - b - a).abs() > (f.abs() + a.abs()) * 2f32.powi(-8);
                    ensure(!far && (inside || f == b), || {
                        format!("{dtype} token {t} column {i}: {b}, {a}: {f}")
                    })?;
                }
            }
        }
    }
    Ok(worst.found())
}

/// A step in a graph, on inputs of later steps, whose rows go to other experts.
pub fn captured(cx: &CudaExec) -> Outcome {
    let mut random = Random(46);
    for n in [3, 150] {
        let layer = Layer::new(&mut random, rules()[3].1, [64, 48], DType::BF16, (Activation::Silu, true));
        let (experts, mut rows) = (layer.load(cx)?, rows(cx, &mut random, &layer, n)?);
        let (mut buffers, mut out) = (layer.buffers(cx, n)?, poisoned(cx, DType::BF16, &[n, 64])?);
        let ((), graph) = cx
            .capture(|| {
                let (x, logits) = (rows.x.view(), rows.logits.view());
                let done = cx.mixture_of_experts(&*experts, x, logits, &mut *buffers, false, out.view_mut());
                Ok::<_, CudaError>(done?)
            })
            .map_err(text)?;
        let nodes = graph.nodes().map_err(text)?;
        ensure(nodes == 5, || format!("{nodes} nodes"))?;
        for _ in 0..3 {
            let (y, _) = tensor(cx, DType::BF16, &random.values(n * 64, 1.0), &[n, 64])?;
            let (l, _) = tensor(cx, DType::F32, &random.values(n * 16, 3.0), &[n, 16])?;
            cx.add(rows.x.view_mut(), y.view()).map_err(text)?;
            cx.add(rows.logits.view_mut(), l.view()).map_err(text)?;
            graph.launch().map_err(text)?;
            let replayed = read(cx, &out)?;
            let mut own = layer.buffers(cx, n)?;
            let eager = run(cx, &layer, &*experts, &mut *own, &rows, (0, n))?;
            ensure(replayed == eager, || format!("{n} rows: a replay differs"))?;
        }
    }
    Ok("6 replays".into())
}

pub fn refusals(cx: &CudaExec) -> Outcome {
    let mut random = Random(47);
    let layer = Layer::new(&mut random, rules()[0].1, [32, 16], DType::BF16, (Activation::Silu, false));
    let says = |e: Option<String>, words: &str| {
        let e = e.unwrap_or_default();
        ensure(e.contains(words), || format!("'{e}', not '{words}'"))
    };
    says(cx.load_experts(layer.spec(true)?, None).err().map(text), "float32")?;
    let mut spec = layer.spec(true)?;
    spec.experts.pop();
    says(cx.load_experts(spec, Some(DType::BF16)).err().map(text), "one an expert")?;
    let experts = layer.load(cx)?;
    ensure(experts.limits() == layer.limits(), || format!("{:?}", experts.limits()))?;
    let small = ExpertLimits { intermediate: 8, ..layer.limits() };
    let mut small = cx.expert_buffers(small, 2).map_err(text)?;
    let mut buffers = layer.buffers(cx, 2)?;
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(cx, dtype, shape).map_err(text);
    let (x, logits) = (zeros(DType::BF16, &[2, 32])?, zeros(DType::F32, &[2, 8])?);
    let mut out = zeros(DType::BF16, &[2, 32])?;
    let mut run = |x: &Tensor, logits: &Tensor, buffers: &mut dyn ExpertBuffers| {
        let out = out.view_mut();
        cx.mixture_of_experts(&*experts, x.view(), logits.view(), buffers, false, out).err().map(text)
    };
    says(run(&x, &logits, &mut *small), "too small")?;
    says(run(&x, &zeros(DType::BF16, &[2, 8])?, &mut *buffers), "logits of float32")?;
    says(run(&x, &zeros(DType::F32, &[2, 7])?, &mut *buffers), "router logits: shape [2, 7]")?;
    says(run(&zeros(DType::F16, &[2, 32])?, &logits, &mut *buffers), "input: float16")?;
    says(run(&zeros(DType::BF16, &[3, 32])?, &logits, &mut *buffers), "router logits: shape [2, 8]")?;
    ensure(run(&x, &logits, &mut *buffers).is_none(), || "what fits".into())?;
    Ok("7 by name".into())
}
