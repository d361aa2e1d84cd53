//! [`CpuExec`]: what CPU kernels need of their device: the thread pool and the instruction set.
//!
//! Lives as long as the engine and is driven by one thread. Host memory is the device's memory, so it
//! allocates nothing and copies nothing. Not for the arithmetic: see `ops` and `kernels`.

use crate::{Isa, pool::Pool};
use headway_tensor::{Device, DeviceMem, Exec, Result, TensorError};
use std::sync::{Arc, Mutex};

/// How a [`CpuExec`] is made; the default takes what the machine has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads, the calling one included; `None`: one a usable physical core.
    pub threads: Option<usize>,
    /// The instruction set; `None`: the best there is, or what `HEADWAY_CPU_ISA` says.
    pub isa: Option<Isa>,
    /// Whether a row's result must not depend on what else is in the batch. The linear layers and the
    /// element-wise operations hold to that always; attention splits its work by it.
    pub batch_invariant: bool,
}

/// The host processor as a device.
#[derive(Debug)]
pub struct CpuExec {
    pool: Pool,
    isa: Isa,
    attention_isa: Isa,
    batch_invariant: bool,
    /// Codes as float32, for a product; as large as the largest step's.
    pub(crate) widened: Mutex<Vec<f32>>,
}

impl CpuExec {
    /// Starts the worker threads.
    ///
    /// # Errors
    /// An instruction set that this machine lacks; zero threads, or more than the system gives.
    pub fn new(options: CpuOptions) -> Result<Self> {
        let isa = match options.isa {
            None => Isa::detect().map_err(|e| TensorError::Unsupported(e.to_string()))?,
            Some(isa) if isa.is_available() => isa,
            Some(isa) => {
                let have: Vec<_> = Isa::available().iter().map(|i| i.name()).collect();
                return Err(TensorError::Unsupported(format!(
                    "instruction set {isa}: this machine has {}; choose one of these",
                    have.join(", ")
                )));
            }
        };
        let pool = Pool::new(options.threads).map_err(TensorError::Unsupported)?;
        let (attention_isa, batch_invariant) = (isa, options.batch_invariant);
        Ok(Self { pool, isa, attention_isa, batch_invariant, widened: Mutex::default() })
    }

    /// Lowers the instruction set of attention's kernels alone: what is quickest for products of large matrices is not
    /// for every cache.
    ///
    /// # Errors
    /// One above [`CpuExec::isa`], or that this machine lacks.
    pub fn lower_attention_isa(&mut self, isa: Isa) -> Result<()> {
        if isa > self.isa || !isa.is_available() {
            let what = format!("instruction set {isa} for attention where {} is in force", self.isa);
            return Err(TensorError::Unsupported(what));
        }
        self.attention_isa = isa;
        Ok(())
    }

    /// The threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The instruction set in force.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The instruction set of attention's kernels: [`CpuExec::isa`], or the lower one that measurements chose.
    pub fn attention_isa(&self) -> Isa {
        self.attention_isa
    }

    /// Whether batch invariance was asked for.
    pub fn batch_invariant(&self) -> bool {
        self.batch_invariant
    }
}

impl Exec for CpuExec {
    fn device(&self) -> Device {
        Device::CPU
    }

    fn alloc(&self, _: usize) -> Result<Option<Arc<dyn DeviceMem>>> {
        Ok(None)
    }

    /// Never reached through the tensors of this device, which are all on the host.
    fn upload(&self, dst: &Arc<dyn DeviceMem>, _: usize, _: &[u8]) {
        debug_assert!(false, "upload to {:?} through the CPU", dst.device());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_kept_and_impossible_ones_refused() {
        let options = CpuOptions { threads: Some(2), isa: Some(Isa::Portable), batch_invariant: true };
        let cx = CpuExec::new(options).unwrap();
        assert_eq!((cx.pool().threads(), cx.isa(), cx.batch_invariant()), (2, Isa::Portable, true));
        assert!(CpuExec::new(CpuOptions { threads: Some(0), ..Default::default() }).is_err());
        let foreign = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx2 };
        let e = CpuExec::new(CpuOptions { isa: Some(foreign), ..Default::default() }).unwrap_err();
        assert!(e.to_string().contains("portable"), "{e}");
    }

    #[test]
    fn attention_alone_can_be_lowered_and_not_raised() {
        let mut cx = CpuExec::new(CpuOptions { isa: Some(Isa::of_machine()), ..Default::default() }).unwrap();
        assert_eq!(cx.attention_isa(), cx.isa());
        cx.lower_attention_isa(Isa::Portable).unwrap();
        assert_eq!((cx.attention_isa(), cx.isa()), (Isa::Portable, Isa::of_machine()));
        let mut low = CpuExec::new(CpuOptions { isa: Some(Isa::Portable), ..Default::default() }).unwrap();
        let above = if cfg!(target_arch = "x86_64") { Isa::Avx2 } else { Isa::Neon };
        let e = low.lower_attention_isa(above).unwrap_err().to_string();
        assert!(e.contains("portable is in force") && low.attention_isa() == Isa::Portable, "{e}");
    }
}
