//! The forms that the kernels of `csrc/triton/` come in.

use crate::kernels::mla::DEEPSEEK;
use serde::{Deserialize, Serialize};

/// The most parts that a row's keys are divided into.
pub const MOST_PARTS: usize = 32;
/// The command that builds kernels.
const BUILD: &str = "headway kernels build triton";
/// Parts of a row of latents that are added up at once.
const MERGED_AT_ONCE: usize = 8;

/// What a kernel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FormKind {
    /// Few rows a request: decodes.
    FewRows,
    /// The same, the keys in parts.
    FewRowsParts,
    /// Many rows a request: prefills, and batches with some.
    ManyRows,
    /// Rows out of their parts.
    Merge,
    /// Latent attention, few rows a request: decodes of up to 16 heads.
    LatentFewRows,
    /// Latent attention, many.
    LatentManyRows,
    /// Weighted latents out of their parts.
    LatentMerge,
}

impl FormKind {
    /// What a layer of keys and values needs.
    pub const PAGED: &'static [Self] = &[Self::FewRows, Self::FewRowsParts, Self::ManyRows, Self::Merge];
    /// What a layer of latents needs.
    pub const LATENT: &'static [Self] = &[Self::LatentFewRows, Self::LatentManyRows, Self::LatentMerge];

    /// As file names and tables write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FewRows => "few_rows",
            Self::FewRowsParts => "few_rows_parts",
            Self::ManyRows => "many_rows",
            Self::Merge => "merge",
            Self::LatentFewRows => "latent_few_rows",
            Self::LatentManyRows => "latent_many_rows",
            Self::LatentMerge => "latent_merge",
        }
    }

    /// Whether it is one of latent attention.
    pub const fn is_latent(self) -> bool {
        matches!(self, Self::LatentFewRows | Self::LatentManyRows | Self::LatentMerge)
    }

    /// The function in the source, and in what it is compiled to.
    pub const fn function(self) -> &'static str {
        match self {
            Self::Merge => "merge_parts",
            Self::LatentMerge => "merge_latents",
            Self::LatentFewRows | Self::LatentManyRows => "latent_decode",
            _ => "paged_attention",
        }
    }

    /// The arguments that headway launches it with, as Triton writes their types; `T` is the element type.
    const fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Merge => {
                &["*T", "*fp32", "*fp32", "*fp32", "i32", "i32", "i32", "i32", "scratch", "scratch"]
            }
            Self::LatentMerge => &["*T", "*fp32", "*fp32", "i32", "i32", "i32", "scratch", "scratch"],
            Self::LatentFewRows | Self::LatentManyRows => &[
                "*T", "*T", "*T", "*T", "*i32", "*i32", "*i32", "*fp32", "*fp32", "i32", "i32", "i64", "i32",
                "u32", "i32", "i32", "i32", "i32", "fp32", "scratch", "scratch",
            ],
            _ => &[
                "*T", "*T", "*T", "*i32", "*i32", "*i32", "*u8", "*fp32", "*fp32", "*fp32", "i32", "i32",
                "i32", "i32", "i64", "i32", "i64", "i32", "i32", "u32", "i32", "i32", "i32", "i32", "i32",
                "i32", "fp32", "fp32", "scratch", "scratch",
            ],
        }
    }
}

/// A kernel: what it is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form<'a> {
    /// What it does.
    pub kind: FormKind,
    /// Element type of queries, keys, values and outputs: `bfloat16`, `float16`.
    pub dtype: &'a str,
    /// Elements of a head; of a latent without its rotated part.
    pub head_size: usize,
    /// With a cap on the scores.
    pub soft_cap: bool,
}

impl Form<'_> {
    /// A head as the kernel's tiles hold it: a power of 2.
    pub fn padded(&self) -> usize {
        self.head_size.next_power_of_two().max(16)
    }

    /// Rows of a tile.
    pub fn rows(&self) -> usize {
        match self.kind {
            FormKind::FewRows | FormKind::FewRowsParts | FormKind::LatentFewRows => 16,
            FormKind::ManyRows if self.padded() <= 128 => 128,
            FormKind::ManyRows | FormKind::LatentManyRows => 64,
            FormKind::Merge | FormKind::LatentMerge => 1,
        }
    }

    /// Keys of a step; parts that are merged.
    pub fn keys(&self) -> usize {
        match (self.kind, self.padded()) {
            (FormKind::Merge | FormKind::LatentMerge, _) => MOST_PARTS,
            (FormKind::FewRows | FormKind::FewRowsParts, ..=128) | (FormKind::ManyRows, 128) => 128,
            (FormKind::FewRows | FormKind::FewRowsParts, _) => 32,
            _ => 64,
        }
    }

    /// Warps of a block.
    pub fn warps(&self) -> u32 {
        self.schedule().0 as u32
    }

    /// Warps of a block, and stages of the pipeline: keys lie behind the block table, which takes one or two. What was the
    /// fastest on Hopper (`docs/gpu.md`).
    pub(super) fn schedule(&self) -> (usize, usize) {
        match (self.kind, self.padded()) {
            (FormKind::Merge | FormKind::LatentMerge, _) => (4, 1),
            (FormKind::LatentFewRows, _) => (8, 5),
            (FormKind::LatentManyRows, _) => (8, 3),
            (FormKind::ManyRows, ..=64) => (8, 5),
            (FormKind::ManyRows, 128) => (8, 3),
            (FormKind::ManyRows, _) => (4, 3),
            (_, 128) => (4, 3),
            _ => (4, 5),
        }
    }

    /// The type as Triton writes it.
    fn element(&self) -> &'static str {
        if self.dtype == "float16" { "fp16" } else { "bf16" }
    }

    /// The arguments that headway launches it with.
    pub fn arguments(&self) -> Vec<String> {
        self.kind.arguments().iter().map(|a| a.replace('T', self.element())).collect()
    }

    /// The file that it gets, without an ending.
    pub fn name(&self, arch: &str) -> String {
        let cap = if self.soft_cap { "-softcap" } else { "" };
        format!("triton-{}-{}-d{}{cap}-{arch}", self.kind.name(), self.dtype, self.head_size)
    }

    /// As `csrc/triton/compile.py` reads it.
    pub(super) fn order(&self, arch: &str) -> serde_json::Value {
        let (warps, stages) = self.schedule();
        let mut constants = match self.kind.is_latent() {
            true => serde_json::json!({"RANK": self.head_size}),
            false => serde_json::json!({"HEAD": self.head_size, "PAD": self.padded()}),
        };
        match self.kind {
            FormKind::Merge => constants["MOST"] = MOST_PARTS.into(),
            FormKind::LatentMerge => {
                constants["MOST"] = MOST_PARTS.into();
                constants["EACH"] = MERGED_AT_ONCE.into();
            }
            FormKind::LatentFewRows | FormKind::LatentManyRows => {
                constants["ROPE"] = DEEPSEEK.1.into();
                constants["M"] = self.rows().into();
                constants["N"] = self.keys().into();
            }
            _ => {
                constants["M"] = self.rows().into();
                constants["N"] = self.keys().into();
                constants["CAPPED"] = self.soft_cap.into();
                constants["PARTS"] = (self.kind == FormKind::FewRowsParts).into();
            }
        }
        serde_json::json!({
            "name": self.name(arch), "kernel": self.kind.function(), "dtype": self.element(),
            "constants": constants, "num_warps": warps, "num_stages": stages,
        })
    }
}

/// What a layer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TritonWant<'a> {
    /// As [`module_dtype`](crate::modules::module_dtype) writes it.
    pub dtype: &'a str,
    /// What of it: keys and values, or latents.
    pub of: WantOf,
    /// The device's architecture; `None`: any.
    pub arch: Option<&'a str>,
}

/// What the kernels of a layer are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WantOf {
    /// Keys and values.
    Paged {
        /// Elements of a head.
        head_size: usize,
        /// With a cap on the scores.
        soft_cap: bool,
    },
    /// DeepSeek's latents.
    Latent,
}

impl<'a> TritonWant<'a> {
    /// The kernels that such a layer needs.
    pub fn kinds(&self) -> &'static [FormKind] {
        match self.of {
            WantOf::Paged { .. } => FormKind::PAGED,
            WantOf::Latent => FormKind::LATENT,
        }
    }

    /// The form of a kind. A merge knows no cap.
    pub fn form(&self, kind: FormKind) -> Form<'a> {
        let (head_size, soft_cap) = match self.of {
            WantOf::Paged { head_size, soft_cap } => (head_size, soft_cap && kind != FormKind::Merge),
            WantOf::Latent => (DEEPSEEK.0, false),
        };
        Form { kind, dtype: self.dtype, head_size, soft_cap }
    }

    /// The command that builds it.
    pub fn command(&self) -> String {
        format!("{BUILD}{}", self.options())
    }

    /// What follows [`BUILD`] in it.
    pub(crate) fn options(&self) -> String {
        let (of, cap) = match self.of {
            WantOf::Paged { head_size, soft_cap } => {
                (format!("--head-size {head_size}"), if soft_cap { " --soft-cap" } else { "" })
            }
            WantOf::Latent => ("--mla".into(), ""),
        };
        let arch = self.arch.unwrap_or("sm_90a");
        format!(" {of} --dtype {} --arch {arch}{cap}", self.dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_lies_in_a_power_of_two_and_a_tile_in_shared_memory() {
        let want = |head_size| TritonWant {
            dtype: "float16",
            of: WantOf::Paged { head_size, soft_cap: true },
            arch: None,
        };
        for (size, padded, rows) in
            [(8, 16, 128), (40, 64, 128), (128, 128, 128), (136, 256, 64), (256, 256, 64)]
        {
            let form = want(size).form(FormKind::ManyRows);
            assert_eq!((form.padded(), form.rows()), (padded, rows));
            assert!(form.rows() * padded * 2 <= 32 << 10);
        }
    }

    #[test]
    fn a_launch_has_room_for_every_argument() {
        for kind in FormKind::PAGED.iter().chain(FormKind::LATENT) {
            assert!(kind.arguments().len() <= crate::kernels::MOST_WORDS, "{kind:?}");
        }
    }

    #[test]
    fn names_and_commands_say_what_a_kernel_is_for() {
        let of = WantOf::Paged { head_size: 40, soft_cap: true };
        let want = TritonWant { dtype: "float16", of, arch: Some("sm_80") };
        assert_eq!(want.form(FormKind::FewRows).name("sm_80"), "triton-few_rows-float16-d40-softcap-sm_80");
        assert_eq!(want.form(FormKind::Merge).name("sm_80"), "triton-merge-float16-d40-sm_80");
        assert_eq!(
            want.command(),
            "headway kernels build triton --head-size 40 --dtype float16 --arch sm_80 --soft-cap"
        );
        let arguments = want.form(FormKind::Merge).arguments();
        assert_eq!((arguments[0].as_str(), arguments.len()), ("*fp16", 10));
        let latent = TritonWant { of: WantOf::Latent, ..want };
        assert_eq!(
            latent.form(FormKind::LatentMerge).name("sm_80"),
            "triton-latent_merge-float16-d512-sm_80"
        );
        assert_eq!(latent.command(), "headway kernels build triton --mla --dtype float16 --arch sm_80");
        let order = latent.form(FormKind::LatentFewRows).order("sm_80");
        assert_eq!((&order["kernel"], &order["constants"]["ROPE"]), (&"latent_decode".into(), &64.into()));
    }
}
