//! The engine's one file that names device crates: fills the registry with their backends and opens a device.

use super::{StartupError, memory, place::Place};
use crate::{
    options::EngineOptions,
    tuning::{Here, Machine},
};
use headway_attention::{Registry, process::rules::ComputeCapability};
use headway_cpu::{CpuExec, CpuOptions, Isa, processor};
use headway_cuda::{CudaExec, CudaOptions};
use headway_tensor::{Device, Ops, TensorError};
use std::{any::Any, collections::BTreeMap};

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
    /// What figures that are taken on it hold for.
    pub machine: Machine,
}

impl OpenDevice {
    /// The device with the versions that bear on its speed.
    pub fn here(&self, registry: &Registry) -> Here {
        here(self.machine.clone(), registry)
    }

    /// The instruction sets that attention's kernels can be compiled for here, strongest first; none where there is
    /// nothing to choose.
    pub fn attention_isas(&self) -> Vec<&'static str> {
        let any: &dyn Any = &*self.ops;
        let Some(cpu) = any.downcast_ref::<CpuExec>() else { return vec![] };
        Isa::available().iter().rev().filter(|i| **i <= cpu.isa()).map(|i| i.name()).collect()
    }

    /// Lowers the instruction set of attention's kernels.
    ///
    /// # Errors
    /// One that isn't among [`OpenDevice::attention_isas`]; a device that is no CPU.
    pub fn lower_attention_isa(&mut self, name: &str) -> Result<(), StartupError> {
        let wrong = || {
            let what = format!("instruction set {name} for attention on {}", self.description);
            StartupError::Tensor(TensorError::Unsupported(what))
        };
        let isa = Isa::by_name(name).ok_or_else(wrong)?;
        let any: &mut dyn Any = &mut *self.ops;
        let Some(cpu) = any.downcast_mut::<CpuExec>() else {
            let what = format!("instruction set {name}: the device is no CPU");
            return Err(StartupError::Tensor(TensorError::Unsupported(what)));
        };
        cpu.lower_attention_isa(isa)?;
        let all = cpu.isa();
        let without = self.description.find(LOWERED).unwrap_or(self.description.len());
        self.description.truncate(without);
        if isa != all {
            self.description += &format!("{LOWERED}{isa}");
        }
        Ok(())
    }
}

/// Before a lowered instruction set, in a description.
const LOWERED: &str = ", attention in ";

/// A machine's part in [`Here`], with everything else that figures depend on.
pub fn here(machine: Machine, registry: &Registry) -> Here {
    let of_platform = registry.iter().filter(|b| b.rules().platform == machine.platform);
    let names: Vec<String> = of_platform.map(|b| b.rules().name.to_string()).collect();
    let mut versions = match &*machine.platform {
        "cuda" => headway_cuda::versions(),
        _ => BTreeMap::new(),
    };
    versions.insert("headway".into(), env!("CARGO_PKG_VERSION").into());
    versions.insert("backends".into(), names.join(" "));
    Here { machine, versions }
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
        machine: Machine {
            platform: "cpu".into(),
            device: processor::model(),
            instruction_set: Some(exec.isa().to_string()),
            threads: Some(threads),
            ..Machine::default()
        },
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
        machine: Machine {
            platform: "cuda".into(),
            device: info.name.clone(),
            compute_capability: Some(format!("{major}.{minor}")),
            driver: Some(info.driver.clone()),
            ..Machine::default()
        },
        ops: Box::new(exec),
    })
}
