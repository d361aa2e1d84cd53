//! How fast the linear layers run: GB/s of weights at one token beside the memory's read ceiling,
//! GFLOP/s at 512 tokens beside the multiply-add ceiling.
//!
//! `cargo run --release -p headway-cpu --example linear_speed -- [--threads 1,2] [--tokens 1,512] [--type Q4_1]`
//!
//! Figures are the median and the best of repeated runs; with one thread also the median by the time
//! the processor gave this thread, which other programs do not distort. Weights are read from 64 MiB or
//! more, so that no cache holds them. Not a test: it asserts nothing.

use headway_cpu::{CpuExec, CpuOptions, kernels::ceiling};
use headway_tensor::{
    Linear, LinearPart, Ops, SharedBytes, TensorMut, TensorRef, Weight, WeightType, quant::QuantFormat,
};
use std::{hint::black_box, sync::Arc, time::Instant};

type Error = Box<dyn std::error::Error>;

const SHAPES: [(usize, usize); 4] = [(576, 1536), (1536, 576), (576, 576), (4096, 4096)];
/// Bytes of weights that a measurement goes through.
const WORKING_SET: usize = 64 << 20;

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1)).cloned();
    let list = |name: &str, default: &str| -> Result<Vec<usize>, Error> {
        option(name).unwrap_or(default.into()).split(',').map(|n| Ok(n.parse()?)).collect()
    };
    let wanted = option("--type");
    for threads in list("--threads", "1,2")? {
        let cx = CpuExec::new(CpuOptions { threads: Some(threads), ..Default::default() })?;
        let (read, fma) = (read_ceiling(&cx), fma_ceiling(&cx));
        println!(
            "{threads} threads, {}: an empty region takes {:.0} ns",
            cx.isa(),
            ceiling::empty_region(cx.pool()) * 1e9
        );
        println!("ceilings: reads {} GB/s, float32 multiply-adds {} GFLOP/s", read.show(), fma.show());
        for m in list("--tokens", "1,512")? {
            for dtype in types().filter(|t| wanted.as_ref().is_none_or(|w| w == t.name())) {
                for (k, n) in SHAPES {
                    if k % dtype.block_elems() == 0 {
                        measure(&cx, dtype, m, k, n, if m <= 4 { &read } else { &fma })?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn types() -> impl Iterator<Item = WeightType> {
    use QuantFormat::{Q4_1, Q4_K, Q5_0, Q6_K, Q8_0};
    [WeightType::BF16, WeightType::F16, WeightType::F32]
        .into_iter()
        .chain([Q4_1, Q8_0, Q4_K, Q6_K, Q5_0].map(WeightType::Quant))
}

/// Rates of repeated runs.
struct Rates {
    median: f64,
    best: f64,
    /// By processor time, where one thread ran.
    processor: Option<f64>,
}

impl Rates {
    fn show(&self) -> String {
        let own = self.processor.map_or(String::new(), |p| format!(", {p:.2} by processor time"));
        format!("{:.2} (best {:.2}{own})", self.median, self.best)
    }

    /// The rate to compare: by processor time where there is one.
    fn rate(&self) -> f64 {
        self.processor.unwrap_or(self.median)
    }
}

/// Nanoseconds that the processor has given this thread.
fn processor_time() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split(' ').next()?.parse().ok()
}

/// Runs `f`, which does `amount` of work, for about half a second.
fn rates(amount: f64, threads: usize, mut f: impl FnMut()) -> Rates {
    f();
    let (start, mut seconds) = (Instant::now(), Vec::new());
    let before = processor_time();
    while start.elapsed().as_millis() < 500 || seconds.len() < 5 {
        let run = Instant::now();
        f();
        seconds.push(run.elapsed().as_secs_f64());
    }
    let used = before.zip(processor_time()).map(|(a, b)| (b - a) / seconds.len() as f64);
    seconds.sort_by(f64::total_cmp);
    Rates {
        median: amount / seconds[seconds.len() / 2] / 1e9,
        best: amount / seconds[0] / 1e9,
        processor: used.filter(|_| threads == 1).map(|ns| amount / ns),
    }
}

fn read_ceiling(cx: &CpuExec) -> Rates {
    let data: Vec<u8> = (0..4 * WORKING_SET).map(|i| i as u8).collect();
    rates(data.len() as f64, cx.pool().threads(), || {
        cx.pool().run(data.len() >> 18, &|task, _| {
            black_box(ceiling::read(cx.isa(), &data[task << 18..(task + 1) << 18]));
        });
    })
}

fn fma_ceiling(cx: &CpuExec) -> Rates {
    let (steps, tasks) = (1 << 16, cx.pool().threads() * 8);
    rates((steps * tasks * ceiling::flops_of_step(cx.isa())) as f64, cx.pool().threads(), || {
        cx.pool().run(tasks, &|_, _| _ = black_box(ceiling::multiply_adds(cx.isa(), steps)));
    })
}

/// Copies of one layer, as many as fill the working set.
fn layers(cx: &CpuExec, dtype: WeightType, k: usize, n: usize) -> Result<Vec<Arc<dyn Linear>>, Error> {
    let len = dtype.bytes_for(n * k).ok_or("rows that are not whole blocks")?;
    // Small bytes are small numbers in every type, and valid scales.
    let bytes: Vec<u8> = (0..len).map(|i| ((i * 7919) >> 5) as u8 & 0x2f).collect();
    let copies = WORKING_SET.div_ceil(len);
    let layer = |_| -> Result<_, Error> {
        let weight = Weight::new("w", dtype, vec![n, k], SharedBytes::new(bytes.clone()))?;
        Ok(cx.load_linear(vec![LinearPart { weight, bias: None }], None)?)
    };
    (0..copies).map(layer).collect()
}

fn measure(
    cx: &CpuExec,
    dtype: WeightType,
    m: usize,
    k: usize,
    n: usize,
    ceiling: &Rates,
) -> Result<(), Error> {
    let mut layers = layers(cx, dtype, k, n)?;
    if m > 4 {
        layers.truncate(1);
    }
    let x: Vec<f32> = (0..m * k).map(|i| (i * 31 % 255) as f32 / 127.0 - 1.0).collect();
    let mut out = vec![0f32; m * n];
    let work = layers.len() as f64;
    let bytes = dtype.bytes_for(n * k).unwrap_or(0) as f64;
    let (amount, unit) = if m <= 4 { (bytes, "GB/s") } else { ((2 * m * n * k) as f64, "GFLOP/s") };
    let mut failed = None;
    let rates = rates(amount * work, cx.pool().threads(), || {
        for layer in &layers {
            let result = TensorRef::from_host(&x, &[m, k])
                .and_then(|x| cx.linear(&**layer, x, TensorMut::from_host(&mut out, &[m, n])?));
            failed = result.err().or(failed.take());
        }
    });
    if let Some(e) = failed {
        return Err(e.into());
    }
    let share = 100.0 * rates.rate() / ceiling.rate();
    println!(
        "{m:4} tokens {:5} {k:5} -> {n:5}: {} {unit}, {share:.0}% of the ceiling",
        dtype.name(),
        rates.show()
    );
    Ok(())
}
