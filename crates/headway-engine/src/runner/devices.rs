//! The engine's one file that names device crates: fills the registry with their backends and opens a device.

use super::{StartupError, memory, place::Place};
use crate::options::EngineOptions;
use headway_attention::{Registry, process::rules::ComputeCapability};
use headway_cpu::{CpuExec, CpuOptions};
use headway_cuda::{CudaExec, CudaOptions};
use headway_tensor::{Device, Ops};

/// Every backend of this build, most preferred first.
///
/// # Errors
/// Two backends of one name.
pub fn registry() -> Result<Registry, headway_attention::AttentionError> {
    let mut registry = Registry::default();
    headway_cpu::register(&mut registry)?;
    headway_cuda::register(&mut registry)?;
    Ok(registry)
}

/// An open device, with what it says of itself.
pub struct OpenDevice {
    /// Stream, allocator and operations.
    pub ops: Box<dyn Ops>,
    /// One line for the report: instruction set, threads and why; or product and driver.
    pub description: String,
    /// Worker threads in force.
    pub threads: usize,
    /// Why that many.
    pub threads_because: String,
    /// What start-up decides by.
    pub place: Place,
}

/// The device that the options name, open or not.
///
/// # Errors
/// A device that this build doesn't know.
pub fn named(options: &EngineOptions) -> Result<Device, StartupError> {
    let name = options.device.as_deref().unwrap_or("cpu");
    let cuda = |index| Ok(Device { kind: "cuda", index });
    match (name, name.strip_prefix("cuda:")) {
        ("cpu", _) => Ok(Device::CPU),
        ("cuda", _) => cuda(0),
        (_, Some(n)) if let Ok(index) = n.parse() => cuda(index),
        _ => Err(StartupError::NotYet {
            option: "--device",
            value: name.into(),
            supported: "this build runs on: cpu, cuda, cuda:N".into(),
        }),
    }
}

/// Opens the device that the options name.
///
/// # Errors
/// A device that this build or machine doesn't have.
pub fn open(options: &EngineOptions) -> Result<OpenDevice, StartupError> {
    match (named(options)?, &options.device) {
        (Device { kind: "cuda", index }, Some(name)) => cuda(name, index, options),
        _ => cpu(options),
    }
}

fn cpu(options: &EngineOptions) -> Result<OpenDevice, StartupError> {
    let exec = CpuExec::new(CpuOptions {
        threads: options.threads,
        isa: None,
        batch_invariant: options.batch_invariant,
    })
    .map_err(|e| match options.threads {
        Some(n) => StartupError::Option { option: "--threads", value: n.to_string(), why: e.to_string() },
        None => e.into(),
    })?;
    let (threads, why) = (exec.pool().threads(), exec.pool().why());
    Ok(OpenDevice {
        description: format!("cpu, {}, {threads} threads ({why})", exec.isa()),
        threads,
        threads_because: why,
        place: Place::cpu(memory::available_bytes()),
        ops: Box::new(exec),
    })
}

fn cuda(name: &str, ordinal: u32, options: &EngineOptions) -> Result<OpenDevice, StartupError> {
    if let Some(n) = options.threads {
        let why = format!("the threads are the CPU's, and one drives {name}; leave it out");
        return Err(StartupError::Option { option: "--threads", value: n.to_string(), why });
    }
    let refused = |e: headway_cuda::CudaError| StartupError::Option {
        option: "--device",
        value: name.into(),
        why: e.to_string(),
    };
    let exec = CudaExec::open(CudaOptions {
        ordinal,
        batch_invariant: options.batch_invariant,
        ..CudaOptions::default()
    })
    .map_err(refused)?;
    let (free, _) = exec.free_and_total_memory().map_err(refused)?;
    let info = exec.info();
    let (major, minor) = info.capability;
    Ok(OpenDevice {
        description: format!(
            "cuda:{ordinal}, {}, compute capability {major}.{minor}, driver for CUDA {}",
            info.name, info.driver
        ),
        threads: 1,
        threads_because: "one thread drives the device".into(),
        place: Place {
            platform: "cuda",
            capability: Some(ComputeCapability(major, minor)),
            available: Some(free),
        },
        ops: Box::new(exec),
    })
}
