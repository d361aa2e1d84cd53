//! A module's sources: FlashInfer's fixed files, and its templates with what the module is compiled for.

use super::{BuildError, Toolchain, toolchain::HOPPER};
use crate::modules::{Kind, Want};
use minijinja::{Environment, context};
use std::{collections::BTreeMap, fs, path::Path};

/// The masks that are compiled, as the templates name them.
const MASKS: [&str; 2] = ["MaskMode::kNone", "MaskMode::kCausal"];

/// Additional arguments of the paged kernels, by type and name: tensors that may be left out, then numbers. Their order
/// is the order of a call's last arguments.
struct Extra {
    tensors: &'static [(&'static str, &'static str)],
    numbers: &'static [(&'static str, &'static str)],
    /// Where the kernel's parameters keep them.
    at: &'static str,
}

const FA2: Extra = Extra {
    tensors: &[
        ("uint8_t", "maybe_custom_mask"),
        ("int32_t", "maybe_mask_indptr"),
        ("float", "maybe_alibi_slopes"),
        ("uint32_t", "maybe_prefix_len_ptr"),
        ("uint16_t", "maybe_token_pos_in_items_ptr"),
        ("uint16_t", "maybe_max_item_len_ptr"),
        ("uint8_t", "maybe_k_cache_sf"),
        ("uint8_t", "maybe_v_cache_sf"),
    ],
    numbers: &[
        ("double", "logits_soft_cap"),
        ("double", "sm_scale"),
        ("double", "rope_rcp_scale"),
        ("double", "rope_rcp_theta"),
        ("int64_t", "token_pos_in_items_len"),
    ],
    at: "params.",
};

const FA3: Extra = Extra {
    tensors: &[
        ("uint32_t", "maybe_prefix_len_ptr"),
        ("uint16_t", "maybe_token_pos_in_items_ptr"),
        ("uint16_t", "maybe_max_item_len_ptr"),
        ("float", "maybe_scale_v"),
    ],
    numbers: &[
        ("double", "logits_soft_cap"),
        ("double", "sm_scale"),
        ("double", "scale_v_scalar"),
        ("int64_t", "token_pos_in_items_len"),
    ],
    at: "params.additional_params.",
};

impl Extra {
    /// Members of the parameters.
    fn members(&self) -> String {
        let tensors = self.tensors.iter().map(|(t, n)| format!("{t}* {n};\n"));
        tensors.chain(self.numbers.iter().map(|(t, n)| format!("{t} {n};\n"))).collect()
    }

    /// Arguments of the function.
    fn arguments(&self) -> String {
        let tensors = self.tensors.iter().map(|(_, n)| format!(", Optional<ffi::Tensor> {n}"));
        tensors.chain(self.numbers.iter().map(|(t, n)| format!(", {t} {n}"))).collect()
    }

    /// Statements, in one macro, that hand the arguments to the members.
    fn setters(&self) -> String {
        let at = self.at;
        let of = |(t, n): &(&str, &str)| {
            format!("{at}{n} = {n} ? static_cast<{t}*>({n}.value().data_ptr()) : nullptr;")
        };
        let tensors = self.tensors.iter().map(of);
        let numbers = self.numbers.iter().map(|(_, n)| format!("{at}{n} = {n};"));
        tensors.chain(numbers).collect::<Vec<_>>().join(" \\\n")
    }
}

/// CUTLASS's helpers include cuRAND's header for random tensors that no kernel here makes; it is not among the packages
/// that a build asks for. Comes last among the include folders: the real one wins.
const CURAND: &str = "\
#pragma once
struct curandState { int unused; };
typedef curandState curandState_t;
static __device__ inline void curand_init(unsigned long long, unsigned long long, unsigned long long, curandState*) { __trap(); }
static __device__ inline float curand_uniform(curandState*) { __trap(); return 0; }
static __device__ inline float curand_normal(curandState*) { __trap(); return 0; }
static __device__ inline double curand_uniform_double(curandState*) { __trap(); return 0; }
static __device__ inline double curand_normal_double(curandState*) { __trap(); return 0; }
";

/// Where [`CURAND`] lies, in the folder of the sources.
pub(super) const STAND_IN: &str = "stand-in";

/// The mended epilogue of fa3, in the folder of the sources.
const EPILOGUE: &str = "mended_epilogue.cuh";

/// fa3's epilogue without its arrival at the barrier that every one of its threads waits at right after. The barrier is
/// complete when as many arrivals as there are threads came in: with two a thread, the warps that are ahead pass it
/// while the others still write, and rows of the output are what lay in shared memory before (seen in FlashInfer 0.7.4,
/// with compute-sanitizer's memcheck, whose slower threads are further apart). Included first, it takes the place of
/// the package's header, whose guard it has.
fn epilogue(tools: &Toolchain) -> Result<String, BuildError> {
    let path = tools.data.join(HOPPER).join("epilogue.cuh");
    let text = read(&path)?;
    let arrival = "cutlass::arch::NamedBarrier::arrive(NUM_MMA_THREADS,";
    let wrong = |why: &str| BuildError::Template { path: path.clone(), why: why.into() };
    match text.split(arrival).collect::<Vec<_>>().as_slice() {
        [before, after] => {
            let end = after.find(';').ok_or_else(|| wrong("a statement has no end"))?;
            Ok(format!("{}{}", before, &after[end + 1..]))
        }
        _ => Err(wrong("the arrival that is to be taken out is not there once")),
    }
}

/// Files by name.
pub(super) struct Sources(BTreeMap<String, String>);

impl Sources {
    /// Those of a module.
    ///
    /// # Errors
    /// A file or template of the package that can't be read or filled in.
    pub fn of(want: &Want<'_>, tools: &Toolchain) -> Result<Self, BuildError> {
        let csrc = tools.data.join("csrc");
        let mut files = BTreeMap::from([(format!("{STAND_IN}/curand_kernel.h"), CURAND.to_owned())]);
        match want.kind {
            Kind::MlaFa2 => latent(want, &csrc, "", &mut files)?,
            Kind::MlaFa3 => latent(want, &csrc, "_sm90", &mut files)?,
            Kind::Fa2 => paged(want, &csrc, "", &FA2, &mut files)?,
            Kind::Fa3 => {
                paged(want, &csrc, "_sm90", &FA3, &mut files)?;
                files.insert(EPILOGUE.into(), epilogue(tools)?);
            }
        }
        Ok(Self(files))
    }

    /// All of them, for telling one set from another.
    pub fn fingerprint(&self) -> String {
        self.0.iter().map(|(name, text)| format!("{name}\n{text}\n")).collect()
    }

    /// Files to compile.
    pub fn units(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str).filter(|n| n.ends_with(".cu"))
    }

    /// Writes them into a folder.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&self, folder: &Path) -> Result<(), BuildError> {
        for (name, text) in &self.0 {
            let path = folder.join(name);
            let parent = path.parent().unwrap_or(folder);
            fs::create_dir_all(parent).map_err(|e| BuildError::file(parent, e))?;
            fs::write(&path, text).map_err(|e| BuildError::file(&path, e))?;
        }
        Ok(())
    }
}

fn element(dtype: &str) -> &'static str {
    if dtype == "float16" { "half" } else { "nv_bfloat16" }
}

fn read(path: &Path) -> Result<String, BuildError> {
    fs::read_to_string(path).map_err(|e| BuildError::file(path, e))
}

/// Fills in a template.
fn render(path: &Path, values: &minijinja::Value) -> Result<String, BuildError> {
    let text = read(path)?;
    let filled = Environment::new().render_str(&text, values);
    filled.map_err(|e| BuildError::Template { path: path.to_owned(), why: format!("{e:#}") })
}

fn paged(
    want: &Want<'_>,
    csrc: &Path,
    suffix: &str,
    extra: &Extra,
    files: &mut BTreeMap<String, String>,
) -> Result<(), BuildError> {
    let (window, cap) = (want.sliding_window, want.soft_cap);
    let (variant, header) = match want.kind {
        Kind::Fa3 => (format!("DefaultAttention<{cap}>"), "flashinfer/attention/hopper/variants.cuh"),
        _ => (
            format!("DefaultAttention<use_custom_mask, {window}, {cap}, false>"),
            "flashinfer/attention/variants.cuh",
        ),
    };
    let values = |mask: &str| {
        context! {
            additional_params_decl => extra.members(),
            additional_func_params => extra.arguments(),
            additional_params_setter => extra.setters(),
            variant_name => &variant,
            variant_decl => format!("#include <{header}>"),
            dtype_q => element(want.dtype),
            dtype_kv => element(want.dtype),
            dtype_o => element(want.dtype),
            idtype => "int32_t",
            head_dim_qk => want.head_size,
            head_dim_vo => want.head_size,
            pos_encoding_mode => "PosEncodingMode::kNone",
            use_sliding_window => window.to_string(),
            use_logits_soft_cap => cap.to_string(),
            use_fp16_qk_reduction => "false",
            use_token_head_sf => "false",
            require_fp4_kv_cache => false,
            // Keys and values lie side by side, so their strides are equal.
            paged_kv_stride_mode => "equal",
            same_kv_strides_values => ["true"],
            mask_mode => mask,
        }
    };
    let config = csrc.join(format!("batch_prefill{suffix}_customize_config.jinja"));
    files.insert(format!("batch_prefill{suffix}_config.inc"), render(&config, &values(""))?);
    let kernels = csrc.join(format!("batch_prefill_paged{suffix}_kernel_inst.jinja"));
    for (i, mask) in MASKS.into_iter().enumerate() {
        let mended =
            if want.kind == Kind::Fa3 { format!("#include \"{EPILOGUE}\"\n") } else { String::new() };
        files.insert(format!("paged_mask_{i}.cu"), mended + &render(&kernels, &values(mask))?);
    }
    let mut fixed =
        vec![format!("batch_prefill{suffix}.cu"), format!("batch_prefill{suffix}_jit_binding.cu")];
    if want.kind == Kind::Fa2 {
        fixed.push("batch_prefill_paged.cuh".into());
    }
    for name in fixed {
        files.insert(name.clone(), read(&csrc.join(name))?);
    }
    Ok(())
}

fn latent(
    want: &Want<'_>,
    csrc: &Path,
    suffix: &str,
    files: &mut BTreeMap<String, String>,
) -> Result<(), BuildError> {
    let dtype = element(want.dtype);
    let values = context! {
        dtype_q => dtype, dtype_kv => dtype, dtype_o => dtype, dtype_idx => "int32_t",
        head_dim_ckv => want.head_size, head_dim_kpe => 64,
    };
    let config = render(&csrc.join("batch_mla_config.jinja"), &values)?;
    files.insert(format!("batch_mla{suffix}_config.inc"), config);
    for part in ["plan", "run", "binding"] {
        let name = format!("batch_mla{suffix}_{part}.cu");
        files.insert(name.clone(), read(&csrc.join(name))?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(folder: &Path) -> Toolchain {
        Toolchain {
            data: folder.to_owned(),
            tvm_include: folder.into(),
            nvcc: "nvcc".into(),
            nvcc_version: "13.0.88".into(),
            cudart: folder.into(),
            cxx: "g++".into(),
        }
    }

    fn want(kind: Kind) -> Want<'static> {
        let dtype = "bfloat16";
        Want { kind, dtype, head_size: 128, sliding_window: true, soft_cap: false, arch: Some("sm_90a") }
    }

    #[test]
    fn templates_are_filled_in_and_files_copied() {
        let folder = tempfile::tempdir().unwrap();
        let csrc = folder.path().join("csrc");
        fs::create_dir(&csrc).unwrap();
        let file = |name: &str, text: &str| fs::write(csrc.join(name), text).unwrap();
        file("batch_prefill_customize_config.jinja", "{{ variant_name }} {{ paged_kv_stride_mode | upper }}");
        let loops = "{# a note #}{% for t in ([16] if head_dim_vo | int >= 512 else [16, 64]) %}{{ mask_mode }}<{{ t }}>{% endfor %}";
        file("batch_prefill_paged_kernel_inst.jinja", loops);
        for name in ["batch_prefill.cu", "batch_prefill_jit_binding.cu", "batch_prefill_paged.cuh"] {
            file(name, name);
        }
        let sources = Sources::of(&want(Kind::Fa2), &tools(folder.path())).unwrap();
        let text = |name: &str| sources.0[name].as_str();
        assert_eq!(
            text("batch_prefill_config.inc"),
            "DefaultAttention<use_custom_mask, true, false, false> EQUAL"
        );
        assert_eq!(text("paged_mask_1.cu"), "MaskMode::kCausal<16>MaskMode::kCausal<64>");
        assert_eq!(
            sources.units().collect::<Vec<_>>(),
            ["batch_prefill.cu", "batch_prefill_jit_binding.cu", "paged_mask_0.cu", "paged_mask_1.cu"]
        );
        file("batch_prefill_customize_config.jinja", "{% for %}");
        let e = Sources::of(&want(Kind::Fa2), &tools(folder.path())).err().unwrap().to_string();
        assert!(e.contains("batch_prefill_customize_config.jinja"), "{e}");
        let e = Sources::of(&want(Kind::Fa3), &tools(folder.path())).err().unwrap().to_string();
        assert!(e.contains("batch_prefill_sm90_customize_config.jinja"), "{e}");
    }

    #[test]
    fn the_epilogue_is_mended_where_it_is_as_known() {
        let folder = tempfile::tempdir().unwrap();
        let hopper = folder.path().join(HOPPER);
        fs::create_dir_all(&hopper).unwrap();
        let of = |text: &str| {
            fs::write(hopper.join("epilogue.cuh"), text).unwrap();
            epilogue(&tools(folder.path()))
        };
        let arrival = "cutlass::arch::NamedBarrier::arrive(NUM_MMA_THREADS,\n  Barrier);";
        assert_eq!(of(&format!("write();{arrival} wait();")).unwrap(), "write(); wait();");
        for text in ["write(); wait();".to_owned(), format!("{arrival}{arrival}")] {
            let e = of(&text).unwrap_err().to_string();
            assert!(e.contains("epilogue.cuh: the arrival"), "{e}");
        }
    }

    #[test]
    fn the_last_arguments_are_those_of_a_call() {
        for (extra, kind, before) in [(&FA2, Kind::Fa2, 16), (&FA3, Kind::Fa3, 16)] {
            let n = extra.tensors.len() + extra.numbers.len();
            assert!(kind.functions().contains(&("paged_run", before + n)), "{kind}");
            assert_eq!(extra.arguments().matches(", ").count(), n);
            assert_eq!(extra.setters().lines().count(), n);
        }
    }
}
