//! The one file that names device crates: fills the registry with their backends and opens a device.

use super::StartupError;
use crate::options::EngineOptions;
use headway_attention::Registry;
use headway_cpu::{CpuExec, CpuOptions};
use headway_tensor::Ops;

/// Every backend of this build, most preferred first.
///
/// # Errors
/// Two backends of one name.
pub fn registry() -> Result<Registry, headway_attention::AttentionError> {
    let mut registry = Registry::default();
    headway_cpu::register(&mut registry)?;
    Ok(registry)
}

/// An open device, with what it says of itself.
pub struct OpenDevice {
    /// Stream, allocator and operations.
    pub ops: Box<dyn Ops>,
    /// One line for the report: instruction set, threads and why.
    pub description: String,
    /// Worker threads in force.
    pub threads: usize,
    /// Why that many.
    pub threads_because: String,
}

/// Opens the device that the options name.
///
/// # Errors
/// A device that this build or machine doesn't have.
pub fn open(options: &EngineOptions) -> Result<OpenDevice, StartupError> {
    match options.device.as_deref().unwrap_or("cpu") {
        "cpu" => {
            let exec = CpuExec::new(CpuOptions {
                threads: options.threads,
                isa: None,
                batch_invariant: options.batch_invariant,
            })
            .map_err(|e| match options.threads {
                Some(n) => {
                    StartupError::Option { option: "--threads", value: n.to_string(), why: e.to_string() }
                }
                None => e.into(),
            })?;
            let (threads, why) = (exec.pool().threads(), exec.pool().why());
            Ok(OpenDevice {
                description: format!("cpu, {}, {threads} threads ({why})", exec.isa()),
                threads,
                threads_because: why,
                ops: Box::new(exec),
            })
        }
        other => Err(StartupError::NotYet {
            option: "--device",
            value: other.into(),
            supported: "this build runs on: cpu".into(),
        }),
    }
}
