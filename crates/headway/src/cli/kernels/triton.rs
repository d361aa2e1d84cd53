//! `headway kernels build triton`, and the part of `list` that is about what it made.

use super::{BuildArgs, CliError, folder, say};
use comfy_table::{ContentArrangement, Table, presets};
use headway_cuda::modules::triton::{TritonBuild, TritonEntry, TritonError, TritonFolder, build_triton};
use serde_json::{Value, json};
use std::{path::Path, process::ExitCode};

/// Builds what is asked for.
pub(super) fn make(a: &BuildArgs) -> Result<ExitCode, CliError> {
    let others = [
        (a.sliding_window, "--sliding-window", "every kernel of these takes a window"),
        (!a.kind.is_empty(), "--kind", "a layer needs all of them"),
        (a.nvcc.is_some(), "--nvcc", "Triton brings its own"),
        (a.jobs.is_some(), "--jobs", "Triton compiles one after another"),
    ];
    if let Some((_, option, why)) = others.iter().find(|o| o.0) {
        return Err(CliError::Usage(format!("{option} is not for triton: {why}; leave it out")));
    }
    let options = TritonBuild {
        folder: folder(a.out.as_ref())?,
        head_sizes: a.head_size.clone(),
        dtypes: a.dtype.clone(),
        arch: a.arch.clone(),
        soft_cap: a.soft_cap,
        mla: a.mla,
        packages: a.packages.clone(),
    };
    let report = build_triton(&options, &mut |line| note!("{line}"))?;
    say(a, &options.folder, &report.built, &report.present)
}

/// A folder's kernels, with what is wrong with each where that was asked.
pub(super) struct Listed {
    folder: TritonFolder,
    checked: bool,
    faults: Vec<Option<TritonError>>,
}

impl Listed {
    pub(super) fn of(path: &Path, check: bool) -> Result<Self, CliError> {
        let folder = TritonFolder::open(path)?;
        let fault = |k: &TritonEntry| check.then(|| folder.code(k, None)).and_then(Result::err);
        let faults = folder.kernels().iter().map(fault).collect();
        Ok(Self { folder, checked: check, faults })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.folder.kernels().is_empty()
    }

    pub(super) fn faults(&self) -> impl Iterator<Item = &TritonError> {
        self.faults.iter().flatten()
    }

    pub(super) fn json(&self) -> Vec<Value> {
        let one = |(k, fault): (&TritonEntry, &Option<TritonError>)| {
            let mut of = json!(k);
            if self.checked {
                of["fault"] = json!(fault.as_ref().map(ToString::to_string));
            }
            of
        };
        self.folder.kernels().iter().zip(&self.faults).map(one).collect()
    }

    pub(super) fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header([
            "KERNEL",
            "DTYPE",
            "HEAD SIZE",
            "FORM",
            "ARCH",
            "TRITON",
            "SHARED",
            "BYTES",
            "FILE",
        ]);
        for k in self.folder.kernels() {
            let form = if k.soft_cap { "soft cap" } else { "plain" };
            let [size, shared, bytes] = [k.head_size.to_string(), k.shared.to_string(), k.bytes.to_string()];
            table.add_row([
                k.kind.name(),
                &k.dtype,
                &size,
                form,
                &k.arch,
                &k.triton,
                &shared,
                &bytes,
                &k.file,
            ]);
        }
        table
    }
}
