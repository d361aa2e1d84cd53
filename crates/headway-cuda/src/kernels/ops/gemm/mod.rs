//! Products of matrices by cuBLASLt: an algorithm is chosen once a shape and kept.
//!
//! With batch invariance every batch size gets the algorithm of one fixed size, without splits of the inner dimension,
//! so that a row's sums are added in one order whatever else is in the batch.

mod described;

use super::rows::Rows;
use crate::{
    CudaExec,
    device::{CudaError, Doing, Result},
};
use cudarc::cublaslt::{
    result,
    sys::{
        self, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDescAttributes_t as DescAttribute,
        cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreferenceAttributes_t as Preference,
    },
};
use described::{Described, Key, Preferences, alignment, failed};
use headway_tensor::{DType, DeviceMem, Exec};
use std::{cell::RefCell, collections::HashMap, ffi::c_void, sync::Arc};

/// Bytes that an algorithm may use beside its operands: what NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Shapes whose plans are kept; beyond them all are dropped, and chosen anew.
const MOST_PLANS: usize = 4096;
/// Rows of the batch whose algorithm serves every batch, with batch invariance.
const INVARIANT_ROWS: u64 = 64;
/// The library's numbers for ways to add up partial sums of a split inner dimension.
const SUMS_IN_PLACE: u32 = 1;
const SUMS_IN_FLOAT32: u32 = 2;

/// `out[t] = x[t] · wᵀ + bias`, described by its addresses and sizes; or one such product for each head of x and out,
/// each of a weight of its own.
pub(crate) struct Product {
    /// Address of `[out, in]`, contiguous.
    pub weight: u64,
    /// Element type of weight and input.
    pub dtype: DType,
    /// Rows and columns of the weight.
    pub shape: [usize; 2],
    /// Address of `[out]` in the output's type.
    pub bias: Option<u64>,
    /// Elements from one head's weight to the next's.
    pub head_step: usize,
    /// The weight lies `[in, out]`.
    pub by_input: bool,
}

/// The library's descriptions and its choice for one shape.
struct Plan {
    shape: Described,
    algo: cublasLtMatmulAlgo_t,
}

/// The library's handle, its working memory and what it chose.
pub(crate) struct Gemm {
    handle: cublasLtHandle_t,
    workspace: Arc<dyn DeviceMem>,
    plans: RefCell<HashMap<Key, Plan>>,
}

impl Drop for Gemm {
    fn drop(&mut self) {
        self.plans.borrow_mut().clear();
        // SAFETY: of `create_handle`, and not used after this.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl Gemm {
    /// The library, loaded at the first product.
    ///
    /// # Errors
    /// As [`Gemm::new`].
    pub fn of(cx: &CudaExec) -> Result<&Self> {
        if let Some(gemm) = cx.gemm.get() {
            return Ok(gemm);
        }
        let gemm = Self::new(cx)?;
        Ok(cx.gemm.get_or_init(|| gemm))
    }

    /// Loads the library.
    ///
    /// # Errors
    /// It is not there; no memory.
    pub fn new(cx: &CudaExec) -> Result<Self> {
        // SAFETY: looks for a library by its name; its initialisers are NVIDIA's.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoLibrary {
                library: "libcublasLt",
                needed_for: "a linear layer",
                package: "nvidia-cublas",
            });
        }
        cx.context().bind_to_thread().doing("binding the context")?;
        let workspace = cx.alloc(WORKSPACE)?;
        let workspace = workspace.ok_or_else(|| CudaError::Argument("no device memory".into()))?;
        let handle = result::create_handle().map_err(|e| failed("opening cuBLASLt", e))?;
        Ok(Self { handle, workspace, plans: RefCell::default() })
    }

    /// Queues the product. The caller has checked shapes and devices.
    ///
    /// # Errors
    /// Types without a kernel, no algorithm; the library's.
    pub(super) fn run(&self, cx: &CudaExec, p: &Product, x: &Rows, out: &Rows) -> Result<()> {
        cx.check()?;
        if x.tokens == 0 {
            return Ok(());
        }
        cx.context().bind_to_thread().doing("binding the context")?;
        let (heads, size) = (x.heads.max(1) as u64, |r: &Rows| r.dtype.size() as i64);
        let step = |r: &Rows| if r.tokens > 1 || heads > 1 { r.arg.row / size(r) } else { r.width as i64 };
        let align = |r: &Rows| {
            let rows = alignment([r.arg.at, (step(r) * size(r)) as u64]);
            if heads > 1 { rows.min(alignment([0, r.arg.head as u64])) } else { rows }
        };
        let weight_row = p.shape[usize::from(!p.by_input)] * p.dtype.size();
        let weight_head = if heads > 1 { p.head_step * p.dtype.size() } else { 0 };
        let key = Key {
            rows: x.tokens as u64,
            shape: p.shape,
            x_row: step(x),
            out_row: step(out),
            dtype: p.dtype,
            out_dtype: out.dtype,
            bias: p.bias.is_some(),
            batch: heads,
            batch_steps: match heads {
                1 => [0; 3],
                _ => [p.head_step as i64, x.arg.head / size(x), out.arg.head / size(out)],
            },
            by_input: p.by_input,
            align: [
                alignment([p.weight, weight_row as u64]).min(alignment([0, weight_head as u64])),
                align(x),
                align(out),
            ],
        };
        let mut plans = self.plans.borrow_mut();
        if !plans.contains_key(&key) {
            if plans.len() >= MOST_PLANS {
                plans.clear();
            }
            plans.insert(key, self.plan(&key, cx.batch_invariant())?);
        }
        let Some(plan) = plans.get(&key) else { return Ok(()) };
        if let Some(bias) = &p.bias {
            plan.shape.set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
        }
        let (one, zero) = (1f32, 0f32);
        let [w_layout, x_layout, out_layout] = plan.shape.layouts[..] else { return Ok(()) };
        // SAFETY: the operands lie in memory of this device and have the layouts described, as the caller checked; the
        // working memory is as large as the preferences said, and used in the stream's order.
        unsafe {
            result::matmul(
                self.handle,
                plan.shape.desc,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                p.weight as *const c_void,
                w_layout,
                x.arg.at as *const c_void,
                x_layout,
                out.arg.at as *const c_void,
                out_layout,
                out.arg.at as *mut c_void,
                out_layout,
                &plan.algo,
                self.workspace.addr() as *mut c_void,
                WORKSPACE,
                cx.stream().cu_stream().cast(),
            )
        }
        .map_err(|e| failed(&key.to_string(), e))
    }

    fn plan(&self, key: &Key, invariant: bool) -> Result<Plan> {
        let shape = Described::new(key, key.rows)?;
        if !invariant {
            let algo = self.choose(&shape, key, false)?;
            return Ok(Plan { shape, algo });
        }
        let algo = self.choose(&Described::new(key, INVARIANT_ROWS)?, key, true)?;
        self.check(&shape, key, &algo)?;
        Ok(Plan { shape, algo })
    }

    fn choose(&self, shape: &Described, key: &Key, invariant: bool) -> Result<cublasLtMatmulAlgo_t> {
        let preferences =
            Preferences(result::create_matmul_pref().map_err(|e| failed("choosing an algorithm", e))?);
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: the preferences live, and each value is a live integer of the attribute's size.
            unsafe { result::set_matmul_pref_attribute(preferences.0, attribute, value, size) }
                .map_err(|e| failed("choosing an algorithm", e))
        };
        let bytes = WORKSPACE as u64;
        set(
            Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&raw const bytes).cast(),
            size_of::<u64>(),
        )?;
        // What depends on where a row begins must not decide, if the row's number may not either.
        let align = if invariant { key.align.map(|a| a.min(16)) } else { key.align };
        let [w, x, out] = &align;
        for (attribute, align) in [
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, w),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, x),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out),
        ] {
            set(attribute, std::ptr::from_ref(align).cast(), size_of::<u32>())?;
        }
        // Partial sums are added up in float32, or there are none.
        let reductions = if invariant { 0 } else { SUMS_IN_PLACE | SUMS_IN_FLOAT32 };
        set(
            Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            (&raw const reductions).cast(),
            size_of::<u32>(),
        )?;
        let [w, x, out] = shape.layouts[..] else {
            return Err(CudaError::Argument("a product of other than two operands".into()));
        };
        // SAFETY: handle, descriptions and preferences live.
        let chosen = unsafe {
            result::get_matmul_algo_heuristic(self.handle, shape.desc, w, x, out, out, preferences.0)
        };
        Ok(chosen.map_err(|e| failed(&key.to_string(), e))?.algo)
    }

    /// That an algorithm chosen for one size runs another.
    fn check(&self, shape: &Described, key: &Key, algo: &cublasLtMatmulAlgo_t) -> Result<()> {
        let [w, x, out] = shape.layouts[..] else {
            return Err(CudaError::Argument("a product of other than two operands".into()));
        };
        let mut found = cublasLtMatmulHeuristicResult_t {
            algo: *algo,
            workspaceSize: 0,
            state: sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        // SAFETY: handle, descriptions and algorithm live; the result is a live structure.
        unsafe { sys::cublasLtMatmulAlgoCheck(self.handle, shape.desc, w, x, out, out, algo, &mut found) }
            .result()
            .map_err(|e| failed(&format!("{key} with the algorithm of {INVARIANT_ROWS} rows"), e))
    }
}
