//! Memory, uploads, graphs, events, kept kernels.

use crate::{Outcome, Test, compiled, ensure, text};
use headway_cuda::{CudaExec, CudaOptions, device::RING_BYTES};
use headway_tensor::{
    DType, Device, DeviceMem, Exec, LinearPart, Ops, Persistent, Tensor, TensorError, Weight,
};
use std::{cell::RefCell, fs, rc::Rc, sync::Arc};

pub const TESTS: &[Test] = &[
    ("device::memory", memory),
    ("device::out_of_memory", out_of_memory),
    ("device::memory_limit", memory_limit),
    ("device::uploads_round_the_ring", ring),
    ("device::kept_failures", kept_failures),
    ("device::strided_reads", strided_reads),
    ("device::events", events),
    ("device::capture_and_replay", capture),
    ("device::refused_while_capturing", refused_while_capturing),
    ("device::a_graph_keeps_memory_mapped", graph_keeps_memory),
    ("device::kept_kernels", kept_kernels),
    ("device::a_persistent_buffer_begins_as_zeros", persistent_zeros),
];

fn alloc(cx: &CudaExec, bytes: usize) -> Result<Arc<dyn DeviceMem>, String> {
    cx.alloc(bytes).map_err(text)?.ok_or_else(|| "host memory from a device".into())
}

/// In memory that held something else before: what an update leaves as it was is not sent.
fn persistent_zeros(cx: &CudaExec) -> Outcome {
    let n = 33;
    for _ in 0..64 {
        let used = (0..64).map(|_| alloc(cx, n * 4)).collect::<Result<Vec<_>, _>>()?;
        used.iter().for_each(|m| cx.upload(m, 0, &vec![0xa5; n * 4]));
        cx.synchronize().map_err(text)?;
        drop(used);
        let mut p = Persistent::<i32>::new(cx, n).map_err(text)?;
        let view = p.update(cx, n, |o, changes| {
            o[7] = 5;
            changes.add(7..8);
        });
        let memory = view.dev().device_mem().ok_or("a buffer on the host")?;
        let mut bytes = vec![0; n * 4];
        cx.read(memory, 0, &mut bytes).map_err(text)?;
        let found: Vec<i32> = bytemuck::pod_collect_to_vec(&bytes);
        ensure(found.iter().enumerate().all(|(i, &x)| x == if i == 7 { 5 } else { 0 }), || {
            format!("{found:?}")
        })?;
    }
    Ok("64 buffers in memory that was used before".into())
}

/// A fixed mix of the position and a seed.
fn byte(i: usize, seed: usize) -> u8 {
    (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 13) as u8
}

fn memory(cx: &CudaExec) -> Outcome {
    for bytes in [0, 1, 255, 4096, 10_000_001] {
        let mem = alloc(cx, bytes)?;
        ensure(mem.bytes() == bytes && mem.device() == cx.device(), || format!("{mem:?}"))?;
        ensure(mem.addr().is_multiple_of(256), || format!("address {:#x}", mem.addr()))?;
        let from: Vec<u8> = (0..bytes).map(|i| byte(i, bytes)).collect();
        cx.upload(&mem, 0, &from);
        let mut back = vec![0; bytes];
        cx.read(&mem, 0, &mut back).map_err(text)?;
        ensure(back == from, || format!("{bytes} bytes came back changed"))?;
        cx.zero(&mem, bytes / 3, bytes / 2);
        cx.read(&mem, 0, &mut back).map_err(text)?;
        let zeroed = bytes / 3..bytes / 3 + bytes / 2;
        let right = (0..bytes).all(|i| back[i] == if zeroed.contains(&i) { 0 } else { from[i] });
        ensure(right, || format!("zeros in {zeroed:?} of {bytes} bytes"))?;
    }
    let zeros = Tensor::zeros(cx, DType::BF16, &[300, 7]).map_err(text)?;
    let bytes = cx.read_tensor(zeros.view()).map_err(text)?;
    ensure(bytes.len() == 4200 && bytes.iter().all(|b| *b == 0), || "zeros are not".into())?;
    Ok("5 sizes".into())
}

fn out_of_memory(cx: &CudaExec) -> Outcome {
    let (_, total) = cx.free_and_total_memory().map_err(text)?;
    let asked = total as usize * 2;
    match cx.alloc(asked) {
        Err(TensorError::OutOfMemory { what, bytes }) => {
            ensure(bytes == asked as u64 && what.contains("bytes are free"), || format!("{what} {bytes}"))?;
        }
        other => return Err(format!("{other:?} for {asked} bytes")),
    }
    alloc(cx, 1 << 20)?;
    Ok(format!("{asked} bytes refused, the device lives"))
}

/// What a first product allocates fails and can be had later; nothing that was there is harmed.
fn memory_limit(_: &CudaExec) -> Outcome {
    const LIMIT: usize = 48 << 20;
    let options = CudaOptions {
        kernel_cache: Some(compiled::folder()),
        memory_limit: Some(LIMIT as u64),
        ..CudaOptions::default()
    };
    let cx = &CudaExec::open(options).map_err(text)?;
    let weight = Weight::from_f32("w", vec![64, 64], &[0.5; 64 * 64]).map_err(text)?;
    let w = cx.load_linear(vec![LinearPart { weight, bias: None }], Some(DType::BF16)).map_err(text)?;
    let x = Tensor::from_slice(cx, &[half::bf16::ONE; 64], &[1, 64]).map_err(text)?;
    let mut out = Tensor::zeros(cx, DType::BF16, &[1, 64]).map_err(text)?;
    let filler = alloc(cx, LIMIT - (1 << 20))?;
    let mut product = || cx.linear(&*w, x.view(), out.view_mut());
    let (refused, words) = match product() {
        Err(e) => (e.is_out_of_memory(), e.to_string()),
        Ok(()) => (false, "no failure".into()),
    };
    ensure(refused && words.contains(&format!("of {LIMIT} bytes are free")), || words.clone())?;
    ensure(cx.alloc(2 << 20).is_err_and(|e| e.is_out_of_memory()), || "more than the limit".into())?;
    alloc(cx, 1 << 10)?;
    drop(filler);
    product().map_err(text)?;
    let found: Vec<u8> = cx.read_tensor(out.view()).map_err(text)?;
    let right = half::bf16::from_f32(32.0).to_le_bytes().repeat(64);
    ensure(found == right, || format!("{:?}", &found[..8]))?;
    Ok(words)
}

/// Many uploads of many sizes, more than the ring holds, each readable in the end.
fn ring(cx: &CudaExec) -> Outcome {
    let sizes: Vec<usize> = (0..600).map(|i| (i * i * 7919) % 300_000 + i % 5).collect();
    let offsets: Vec<usize> = sizes.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + n))).collect();
    let total: usize = sizes.iter().sum();
    let mem = alloc(cx, total)?;
    for (seed, (offset, n)) in offsets.iter().zip(&sizes).enumerate() {
        let from: Vec<u8> = (0..*n).map(|i| byte(i, seed)).collect();
        cx.upload(&mem, *offset, &from);
    }
    let big: Vec<u8> = (0..RING_BYTES + 12_345).map(|i| byte(i, 7)).collect();
    let large = alloc(cx, big.len())?;
    cx.upload(&large, 0, &big);
    let mut back = vec![0; total];
    cx.read(&mem, 0, &mut back).map_err(text)?;
    for (seed, (offset, n)) in offsets.iter().zip(&sizes).enumerate() {
        let right = (0..*n).all(|i| back[offset + i] == byte(i, seed));
        ensure(right, || format!("upload {seed} of {n} bytes"))?;
    }
    let mut back = vec![0; big.len()];
    cx.read(&large, 0, &mut back).map_err(text)?;
    ensure(back == big, || "an upload of more than the ring".into())?;
    Ok(format!("{} MiB in {} uploads", (total + big.len()) >> 20, sizes.len() + 1))
}

#[derive(Debug)]
struct Elsewhere;
impl DeviceMem for Elsewhere {
    fn device(&self) -> Device {
        Device { kind: "npu", index: 0 }
    }
    fn addr(&self) -> u64 {
        64
    }
    fn bytes(&self) -> usize {
        64
    }
}

fn kept_failures(cx: &CudaExec) -> Outcome {
    let mem = alloc(cx, 16)?;
    cx.upload(&mem, 10, &[0; 7]);
    cx.upload(&mem, 0, &[1; 16]);
    let e = cx.synchronize().err().map(text).unwrap_or_default();
    ensure(e.contains("7 bytes from byte 10 on, in memory of 16 bytes"), || e.clone())?;
    let mut back = [0; 16];
    cx.read(&mem, 0, &mut back).map_err(text)?;
    ensure(back == [1; 16], || format!("{back:?}"))?;
    let foreign: Arc<dyn DeviceMem> = Arc::new(Elsewhere);
    cx.zero(&foreign, 0, 8);
    let e = cx.alloc(1).err().map(text).unwrap_or_default();
    ensure(e.contains("npu:0"), || e.clone())?;
    cx.synchronize().map_err(text)?;
    Ok("two failures, each once".into())
}

fn strided_reads(cx: &CudaExec) -> Outcome {
    let data: Vec<f32> = (0..5 * 12).map(|i| i as f32).collect();
    let mut t = Tensor::from_slice(cx, &data, &[5, 12]).map_err(text)?;
    let view = t.view_mut().rows(1..4).and_then(|v| v.cols(4..10)).and_then(|v| v.heads(2));
    let view = view.and_then(|v| v.within_heads(1..3)).map_err(text)?;
    let bytes = cx.read_tensor(view.as_ref()).map_err(text)?;
    let found: Vec<f32> =
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let expected: Vec<f32> = (1..4).flat_map(|r| [5, 6, 8, 9].map(|c| (r * 12 + c) as f32)).collect();
    ensure(found == expected, || format!("{found:?}"))?;
    Ok("rows, columns, parts of heads".into())
}

fn events(cx: &CudaExec) -> Outcome {
    let (start, end) = (cx.event().map_err(text)?, cx.event().map_err(text)?);
    let mem = alloc(cx, 1 << 30)?;
    cx.record(&start).map_err(text)?;
    (0..20).for_each(|_| cx.zero(&mem, 0, 1 << 30));
    cx.record(&end).map_err(text)?;
    let ms = start.elapsed_ms(&end).map_err(text)?;
    ensure(ms > 0.5 && ms < 1000.0, || format!("{ms} ms for 20 GiB"))?;
    Ok(format!("filling at {:.0} GB/s", 20.0 * (1u64 << 30) as f64 / f64::from(ms) / 1e6))
}

fn values(cx: &CudaExec, t: &Tensor) -> Result<Vec<f32>, String> {
    let bytes = cx.read_tensor(t.view()).map_err(text)?;
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

/// Replays read what their inputs hold at that time.
fn capture(cx: &CudaExec) -> Outcome {
    let mut acc = Tensor::zeros(cx, DType::F32, &[4, 100]).map_err(text)?;
    let mut staged = Tensor::zeros(cx, DType::F32, &[4, 100]).map_err(text)?;
    // Loads the kernels, which a recording may not.
    let x = Tensor::from_slice(cx, &[1f32; 400], &[4, 100]).map_err(text)?;
    cx.add(staged.view_mut(), x.view()).map_err(text)?;
    let rows =
        Persistent::<i32>::new(cx, 4).map_err(text)?.write(cx, 4, |o| o.copy_from_slice(&[0, 1, 2, 3]));
    cx.gather_rows(x.view(), &rows, staged.view_mut()).map_err(text)?;
    let ((), graph) = cx
        .capture(|| -> Result<(), headway_cuda::CudaError> {
            cx.gather_rows(x.view(), &rows, staged.view_mut())?;
            cx.add(acc.view_mut(), staged.view())?;
            Ok(())
        })
        .map_err(text)?;
    ensure(!cx.capturing() && graph.nodes().map_err(text)? == 2, || format!("{:?}", graph.nodes()))?;
    ensure(values(cx, &acc)?.iter().all(|v| *v == 0.0), || "a recording ran".into())?;
    for step in 1..=5u32 {
        graph.launch().map_err(text)?;
        let found = values(cx, &acc)?;
        ensure(found.iter().all(|v| *v == step as f32), || format!("replay {step}: {:?}", &found[..4]))?;
    }
    Ok("5 replays of 2 nodes".into())
}

fn refused_while_capturing(cx: &CudaExec) -> Outcome {
    let mem = alloc(cx, 64)?;
    let mut acc = Tensor::zeros(cx, DType::F32, &[4, 4]).map_err(text)?;
    let x = Tensor::from_slice(cx, &[1f32; 16], &[4, 4]).map_err(text)?;
    cx.add(acc.view_mut(), x.view()).map_err(text)?;
    cx.begin_capture().map_err(text)?;
    let refused = [
        cx.begin_capture().err().map(text),
        cx.alloc(8).err().map(text),
        cx.read(&mem, 0, &mut [0; 4]).err().map(text),
        cx.synchronize().err().map(text),
        {
            cx.upload(&mem, 0, &[1; 4]);
            cx.check().err().map(text)
        },
    ];
    let added = cx.add(acc.view_mut(), x.view()).map_err(text);
    let graph = cx.end_capture().map_err(text)?;
    added?;
    for (i, r) in refused.iter().enumerate() {
        ensure(r.as_ref().is_some_and(|r| r.contains("captured")), || format!("{i}: {r:?}"))?;
    }
    graph.launch().map_err(text)?;
    ensure(values(cx, &acc)?.iter().all(|v| *v == 2.0), || "after refusals".into())?;
    let failed = cx.capture(|| Err::<(), _>(headway_cuda::CudaError::Argument("given up".into())));
    ensure(failed.is_err_and(|e| e.to_string() == "given up"), || "a failed recording".into())?;
    cx.begin_capture().map_err(text)?;
    let nothing = cx.end_capture().map(|g| g.nodes().unwrap_or(0));
    ensure(!matches!(nothing, Ok(1..)), || format!("{nothing:?}"))?;
    ensure(!cx.capturing(), || "still capturing".into())?;
    cx.add(acc.view_mut(), x.view()).map_err(text)?;
    ensure(values(cx, &acc)?.iter().all(|v| *v == 3.0), || "after a failed recording".into())?;
    Ok("5 refusals".into())
}

fn graph_keeps_memory(cx: &CudaExec) -> Outcome {
    let bytes = 1 << 30;
    let free = |cx: &CudaExec| cx.free_and_total_memory().map(|(free, _)| free).map_err(text);
    let before = free(cx)?;
    let mem = alloc(cx, bytes)?;
    let ((), graph) = cx
        .capture(|| {
            cx.zero(&mem, 0, 4096);
            cx.check()
        })
        .map_err(text)?;
    let held = free(cx)?;
    drop(mem);
    ensure(free(cx)? <= held, || "freed under a graph".into())?;
    graph.launch().map_err(text)?;
    cx.synchronize().map_err(text)?;
    drop(graph);
    let after = free(cx)?;
    ensure(after >= held + bytes as u64, || {
        format!("{before} free, {held} with, {after} after (of the whole card: no other process may use it)")
    })?;
    Ok("1 GiB freed with its graph".into())
}

/// What is compiled once is found again; what is damaged is compiled again.
fn kept_kernels(_: &CudaExec) -> Outcome {
    let folder = std::env::temp_dir().join(format!("headway-gpu-tests-{}", std::process::id()));
    let run = || -> Result<Vec<String>, String> {
        let said = Rc::new(RefCell::new(vec![]));
        let hears = Rc::clone(&said);
        let cx = CudaExec::open(CudaOptions {
            kernel_cache: Some(folder.clone()),
            progress: Some(Box::new(move |what| hears.borrow_mut().push(what.to_owned()))),
            ..CudaOptions::default()
        })
        .map_err(text)?;
        let mut acc = Tensor::from_slice(&cx, &[1f32; 16], &[4, 4]).map_err(text)?;
        let x = Tensor::from_slice(&cx, &[2f32; 16], &[4, 4]).map_err(text)?;
        (0..3).try_for_each(|_| cx.add(acc.view_mut(), x.view())).map_err(text)?;
        ensure(values(&cx, &acc)?.iter().all(|v| *v == 7.0), || "a wrong sum".into())?;
        drop(cx);
        Ok(said.take())
    };
    let first = run()?;
    ensure(first.len() == 1 && first[0].contains("compiling"), || format!("{first:?}"))?;
    ensure(run()?.is_empty(), || "compiled twice".into())?;
    for entry in fs::read_dir(&folder).map_err(text)? {
        let path = entry.map_err(text)?.path();
        let bytes = fs::read(&path).map_err(text)?;
        fs::write(&path, &bytes[..bytes.len() / 2]).map_err(text)?;
    }
    let again = run()?;
    ensure(again.len() == 1, || format!("{again:?}"))?;
    ensure(run()?.is_empty(), || "not repaired".into())?;
    fs::remove_dir_all(&folder).map_err(text)?;
    Ok("compiled, found, damaged, compiled".into())
}
