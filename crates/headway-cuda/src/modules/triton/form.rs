//! The forms that the kernels of `csrc/triton/attention.py` come in.

use serde::{Deserialize, Serialize};

/// The most parts that a row's keys are divided into.
pub const MOST_PARTS: usize = 32;

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
}

impl FormKind {
    /// All of them: what a layer needs.
    pub const ALL: [Self; 4] = [Self::FewRows, Self::FewRowsParts, Self::ManyRows, Self::Merge];

    /// As file names and tables write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FewRows => "few_rows",
            Self::FewRowsParts => "few_rows_parts",
            Self::ManyRows => "many_rows",
            Self::Merge => "merge",
        }
    }

    /// The function in the source, and in what it is compiled to.
    pub const fn function(self) -> &'static str {
        match self {
            Self::Merge => "merge_parts",
            _ => "paged_attention",
        }
    }

    /// The arguments that headway launches it with, as Triton writes their types; `T` is the element type.
    const fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Merge => {
                &["*T", "*fp32", "*fp32", "*fp32", "i32", "i32", "i32", "i32", "scratch", "scratch"]
            }
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
    /// Elements of a head.
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
            FormKind::FewRows | FormKind::FewRowsParts => 16,
            FormKind::ManyRows if self.padded() <= 128 => 128,
            FormKind::ManyRows => 64,
            FormKind::Merge => 1,
        }
    }

    /// Keys of a step; parts that are merged.
    pub fn keys(&self) -> usize {
        match self.kind {
            FormKind::Merge => MOST_PARTS,
            FormKind::ManyRows => 64,
            _ if self.padded() <= 128 => 64,
            _ => 32,
        }
    }

    /// Warps of a block, and stages of the pipeline: keys lie behind the block table, so that half of the stages are
    /// for those.
    pub(super) fn schedule(&self) -> (usize, usize) {
        match self.kind {
            FormKind::ManyRows if self.padded() <= 128 => (8, 3),
            FormKind::Merge => (4, 1),
            FormKind::ManyRows => (4, 3),
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
        let mut constants = serde_json::json!({"HEAD": self.head_size, "PAD": self.padded()});
        match self.kind {
            FormKind::Merge => constants["MOST"] = MOST_PARTS.into(),
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
    /// Elements of a head.
    pub head_size: usize,
    /// With a cap on the scores.
    pub soft_cap: bool,
    /// The device's architecture; `None`: any.
    pub arch: Option<&'a str>,
}

impl<'a> TritonWant<'a> {
    /// The form of a kind. A merge knows no cap.
    pub fn form(&self, kind: FormKind) -> Form<'a> {
        let soft_cap = self.soft_cap && kind != FormKind::Merge;
        Form { kind, dtype: self.dtype, head_size: self.head_size, soft_cap }
    }

    /// The command that builds it.
    pub fn command(&self) -> String {
        format!(
            "headway kernels build triton --head-size {} --dtype {} --arch {}{}",
            self.head_size,
            self.dtype,
            self.arch.unwrap_or("sm_90a"),
            if self.soft_cap { " --soft-cap" } else { "" }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_lies_in_a_power_of_two_and_a_tile_in_shared_memory() {
        let want = |head_size| TritonWant { dtype: "float16", head_size, soft_cap: true, arch: None };
        for (size, padded, rows) in
            [(8, 16, 128), (40, 64, 128), (128, 128, 128), (136, 256, 64), (256, 256, 64)]
        {
            let form = want(size).form(FormKind::ManyRows);
            assert_eq!((form.padded(), form.rows()), (padded, rows));
            assert!(form.rows() * padded * 2 <= 32 << 10);
        }
    }

    #[test]
    fn names_and_commands_say_what_a_kernel_is_for() {
        let want = TritonWant { dtype: "float16", head_size: 40, soft_cap: true, arch: Some("sm_80") };
        assert_eq!(want.form(FormKind::FewRows).name("sm_80"), "triton-few_rows-float16-d40-softcap-sm_80");
        assert_eq!(want.form(FormKind::Merge).name("sm_80"), "triton-merge-float16-d40-sm_80");
        assert_eq!(
            want.command(),
            "headway kernels build triton --head-size 40 --dtype float16 --arch sm_80 --soft-cap"
        );
        let arguments = want.form(FormKind::Merge).arguments();
        assert_eq!((arguments[0].as_str(), arguments.len()), ("*fp16", 10));
    }
}
