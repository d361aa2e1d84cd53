//! The backends through the suite that every one goes through. `FLASHINFER` runs what its modules are built for,
//! `FLASH_ATTN` and `FLASHMLA` where they were fetched, `TRITON_ATTN` and `TRITON_MLA` what was compiled for them.

use super::{Outcome, Test, composed, flash_attn, mla, text};
use headway_attention::{
    AttentionError, DynBackend, KindTag, KvBuf, Registry, process::rules::ComputeCapability,
};
use headway_cuda::{
    CudaExec, DeviceInfo, KernelSpec,
    kernels::{
        attention::{Shape, spec},
        cache::write_spec,
    },
    modules::{installed, triton::installed_triton},
};
use headway_tensor::{DType, Exec, Linear, LinearPart, Ops, Tensor, Weight};
use headway_testkit::suite::{Cell, HostAccess, SuiteConfig, cells, run_suite_with};
use std::{any::Any, collections::BTreeMap, sync::Arc};

pub const TESTS: &[Test] = &[
    ("attention: the backend suite, CUDA_ATTN", |cx| run(cx, "CUDA_ATTN", 1)),
    ("attention: the backend suite, CUDA_MLA", |cx| run(cx, "CUDA_MLA", 1)),
    ("attention: the backend suite, FLASHINFER", |cx| flashinfer(cx, "FLASHINFER", 1)),
    ("attention: the backend suite, FLASHINFER_MLA", |cx| flashinfer(cx, "FLASHINFER_MLA", 1)),
    ("attention: the backend suite, FLASH_ATTN", |cx| fetched(cx, "FLASH_ATTN", 1)),
    ("attention: the backend suite, FLASHMLA", |cx| fetched(cx, "FLASHMLA", 1)),
    ("attention: the backend suite, TRITON_ATTN", |cx| triton(cx, "TRITON_ATTN", 1)),
    ("attention: the backend suite, TRITON_MLA", |cx| triton(cx, "TRITON_MLA", 1)),
    // So few cells that tools which watch every access are done with them soon.
    ("attention: CUDA_ATTN, a sample", |cx| run(cx, "CUDA_ATTN", 23)),
    ("attention: CUDA_MLA, a sample", |cx| run(cx, "CUDA_MLA", 23)),
    ("attention: FLASHINFER, a sample", |cx| flashinfer(cx, "FLASHINFER", 23)),
    ("attention: FLASHINFER_MLA, a sample", |cx| flashinfer(cx, "FLASHINFER_MLA", 23)),
    ("attention: FLASH_ATTN, a sample", |cx| fetched(cx, "FLASH_ATTN", 23)),
    ("attention: FLASHMLA, a sample", |cx| fetched(cx, "FLASHMLA", 23)),
    ("attention: TRITON_ATTN, a sample", |cx| triton(cx, "TRITON_ATTN", 23)),
    ("attention: TRITON_MLA, a sample", |cx| triton(cx, "TRITON_MLA", 11)),
    ("attention: keys in parts, prefills of several tiles, TRITON_ATTN", triton_long),
];

/// Bytes between the host and a CUDA device.
pub struct CudaMemory;

fn cuda(exec: &dyn Exec) -> Result<&CudaExec, AttentionError> {
    let exec: &dyn Any = exec;
    exec.downcast_ref().ok_or_else(|| AttentionError::Inputs("not a CUDA device".into()))
}

impl HostAccess for CudaMemory {
    fn new_cache(&self, exec: &dyn Exec, bytes: &[u8]) -> Result<KvBuf, AttentionError> {
        let memory =
            exec.alloc(bytes.len())?.ok_or_else(|| AttentionError::Inputs("no device memory".into()))?;
        exec.upload(&memory, 0, bytes);
        Ok(KvBuf::Dev(memory))
    }

    fn read_cache(&self, exec: &dyn Exec, cache: &KvBuf) -> Result<Vec<u8>, AttentionError> {
        let KvBuf::Dev(memory) = cache else {
            return Err(AttentionError::KvCache("the cache is on the host".into()));
        };
        let mut bytes = vec![0; memory.bytes()];
        cuda(exec)?.read(memory, 0, &mut bytes)?;
        Ok(bytes)
    }

    fn load_linear(
        &self,
        exec: &dyn Exec,
        weight: Weight,
        activations: DType,
    ) -> Result<Arc<dyn Linear>, AttentionError> {
        Ok(cuda(exec)?.load_linear(vec![LinearPart { weight, bias: None }], Some(activations))?)
    }

    fn rounds_expanded(&self) -> bool {
        true
    }

    /// FlashAttention-3 takes 8-bit keys with 8-bit queries.
    fn attends_in(&self, backend: &str, cell: &Cell) -> Option<DType> {
        let coded = backend == "FLASH_ATTN" && cell.kv_element() == Some(DType::F8E4M3);
        coded.then_some(DType::F8E4M3)
    }

    fn read_tensor(&self, exec: &dyn Exec, tensor: &Tensor) -> Result<Vec<u8>, AttentionError> {
        Ok(cuda(exec)?.read_tensor(tensor.view())?)
    }
}

pub fn registry() -> Result<Registry, AttentionError> {
    let mut registry = Registry::default();
    headway_cuda::register(&mut registry)?;
    Ok(registry)
}

pub fn backends() -> Result<Vec<Arc<dyn DynBackend>>, AttentionError> {
    let attends = |b: &&Arc<dyn DynBackend>| b.rules().kind != KindTag::StateSpace;
    Ok(registry()?.iter().filter(attends).cloned().collect())
}

/// The kernels that the suite's cells need on this device.
pub fn specs(info: &DeviceInfo) -> Result<Vec<KernelSpec>, AttentionError> {
    let mut all = BTreeMap::new();
    let (registry, mut backends) = (registry()?, backends()?);
    for name in composed::NAMES {
        backends.push(registry.get(name)?);
    }
    for backend in backends {
        let rules = backend.rules();
        for cell in cells(rules) {
            if backend.combination(&cell.need(rules)).is_some() {
                continue;
            }
            if cell.latent.is_some() {
                for s in mla::specs(info, &cell)? {
                    all.insert(format!("{s:?}"), s);
                }
                continue;
            }
            let (Some(cache), Ok(shape)) =
                (cell.kv_element(), Shape::new(cell.num_heads, cell.num_kv_heads, cell.head_size))
            else {
                continue;
            };
            let plain = cell.features.soft_cap.is_none() && !cell.features.alibi;
            let shared = info.shared_per_block as usize;
            for s in [
                spec(&shape, cell.dtype, cache, plain, shared)?,
                write_spec(cell.head_size, cell.dtype, cache)?,
            ] {
                all.insert(format!("{s:?}"), s);
            }
        }
    }
    Ok(all.into_values().collect())
}

/// Why a backend of modules has none here; `None` if it has some.
pub fn without_modules(name: &str) -> Result<Option<String>, String> {
    let folder = installed().as_ref().map_err(ToString::to_string)?;
    let latent = name == "FLASHINFER_MLA";
    let none = folder.modules().iter().all(|m| m.kind.is_mla() != latent);
    Ok(none.then(|| format!("{name}: not run: no modules; set HEADWAY_KERNELS_DIR to a folder of them")))
}

fn flashinfer(cx: &CudaExec, name: &str, every: usize) -> Outcome {
    match without_modules(name)? {
        Some(why) => Ok(why),
        None => run(cx, name, every),
    }
}

fn fetched(cx: &CudaExec, name: &str, every: usize) -> Outcome {
    flash_attn::missing(name).map_or_else(|| run(cx, name, every), |why| Ok(format!("{name}: {why}")))
}

/// Why a backend of Triton kernels is not run; `None` if it has kernels.
pub fn without_triton(name: &str) -> Result<Option<String>, String> {
    let folder = installed_triton().as_ref().map_err(ToString::to_string)?;
    let there = folder.kernels().iter().any(|k| k.kind.is_latent() == (name == "TRITON_MLA"));
    let why = "not run: no kernels; set HEADWAY_KERNELS_DIR to a folder that they were built into";
    Ok((!there).then(|| format!("{name}: {why}")))
}

fn triton(cx: &CudaExec, name: &str, every: usize) -> Outcome {
    without_triton(name)?.map_or_else(|| run(cx, name, every), Ok)
}

/// New tokens and all tokens of requests, decodes first; and of decodes alone, whose keys are in parts.
const LONG: [&[(usize, usize)]; 2] =
    [&[(1, 2500), (1, 64), (40, 300), (5, 1530), (350, 350)], &[(1, 2500), (1, 64), (1, 513)]];

/// What the suite's short requests don't reach.
fn triton_long(cx: &CudaExec) -> Outcome {
    if let Some(why) = without_triton("TRITON_ATTN")? {
        return Ok(why);
    }
    let backends = backends().map_err(|e| e.to_string())?;
    let backend = backends.iter().find(|b| b.rules().name == "TRITON_ATTN");
    let backend = backend.ok_or_else(|| "TRITON_ATTN is not registered".to_owned())?;
    let (major, minor) = cx.info().capability;
    let mut said = vec![];
    for requests in LONG {
        let config = SuiteConfig {
            requests: Some(requests.to_vec()),
            every: 37,
            compute_capability: Some(ComputeCapability(major, minor)),
            ..SuiteConfig::default()
        };
        let report = run_suite_with(&**backend, cx, &CudaMemory, &config);
        if !report.ok() {
            return Err(report.to_string());
        }
        said.push(report.to_string());
    }
    Ok(said.join("\n"))
}

/// Every so many cells of a backend.
fn run(cx: &CudaExec, name: &str, every: usize) -> Outcome {
    run_with(cx, name, SuiteConfig { every, ..SuiteConfig::default() })
}

/// The suite over a backend, one made of two among them.
pub fn run_with(cx: &CudaExec, name: &str, config: SuiteConfig) -> Outcome {
    let backend = registry().and_then(|r| r.get(name)).map_err(text)?;
    // A device whose blocks have less refuses heads by the table of such devices.
    let small = cx.info().shared_per_block < 100 << 10;
    let (major, minor) = if small { (8, 6) } else { cx.info().capability };
    let capability = Some(ComputeCapability(major, minor));
    let config = SuiteConfig { compute_capability: capability, ..config };
    let report = run_suite_with(&*backend, cx, &CudaMemory, &config);
    if report.ok() { Ok(report.to_string()) } else { Err(report.to_string()) }
}
