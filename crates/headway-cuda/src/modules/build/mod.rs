//! From FlashInfer's package to a folder of modules: its templates are filled in, nvcc compiles them, the linked file is
//! asked for its functions and put into the manifest. What is there already is left; objects of an interrupted build
//! are used again. No GPU, torch or Python module is needed; `python3` is only asked where packages lie.

mod compile;
mod error;
mod sources;
mod toolchain;

pub use error::BuildError;
pub use toolchain::{Toolchain, ToolchainOptions};

use super::{Entry, FLASHINFER, Kind, Mask, ModuleFolder, RECIPE, Want, folder::sha256, module::Module};
use compile::{Unit, compile_all, link};
use sources::Sources;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// What to build.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// The folder of modules; made where it is not there.
    pub folder: PathBuf,
    /// Heads' sizes, for [`Kind::Fa2`] and [`Kind::Fa3`].
    pub head_sizes: Vec<usize>,
    /// Latent attention (512 and 64), for [`Kind::MlaFa2`] and [`Kind::MlaFa3`].
    pub mla: bool,
    /// Element types, as manifests name them.
    pub dtypes: Vec<String>,
    /// The architecture (`sm_90a`).
    pub arch: String,
    /// With a sliding window.
    pub sliding_window: bool,
    /// With a cap on the logits.
    pub soft_cap: bool,
    /// Kinds to build; empty: all that the architecture has.
    pub kinds: Vec<Kind>,
    /// Compilers at once.
    pub jobs: usize,
}

/// The latent's size that latent attention is compiled for; the rotary part has 64.
pub const LATENT: usize = 512;
/// Head sizes that FlashInfer's kernels come in.
pub const HEAD_SIZES: [usize; 3] = [64, 128, 256];

impl BuildOptions {
    /// Every module that is asked for.
    ///
    /// # Errors
    /// A head size, type, architecture or kind that there is no kernel for; nothing asked for.
    pub fn wants(&self) -> Result<Vec<Want<'_>>, BuildError> {
        let ask = |what: String| Err(BuildError::Asked(what));
        if let Some(n) = self.head_sizes.iter().find(|n| !HEAD_SIZES.contains(n)) {
            return ask(format!("head size {n}: FlashInfer's kernels come in 64, 128 and 256"));
        }
        if let Some(d) = self.dtypes.iter().find(|d| !["bfloat16", "float16"].contains(&d.as_str())) {
            return ask(format!("dtype {d}: modules are built for bfloat16 and float16"));
        }
        let number = self.arch.strip_prefix("sm_").map(|n| n.trim_end_matches(['a', 'f']));
        if number.and_then(|n| n.parse::<u32>().ok()).is_none_or(|n| n < 80) {
            return ask(format!(
                "architecture {}: write it as sm_90a; sm_80 is the first that will do",
                self.arch
            ));
        }
        let hopper = self.arch == "sm_90a";
        if let Some(k) = self.kinds.iter().find(|k| k.is_hopper() && !hopper) {
            return ask(format!("kind {k} with --arch {}: its kernels are for sm_90a", self.arch));
        }
        let wanted = |k: &Kind| {
            let here = !k.is_hopper() || hopper;
            let named = self.kinds.is_empty() || self.kinds.contains(k);
            here && named && if k.is_mla() { self.mla } else { !self.head_sizes.is_empty() }
        };
        let mut wants = vec![];
        for kind in Kind::ALL.into_iter().filter(wanted) {
            let sizes = if kind.is_mla() { &[LATENT][..] } else { &self.head_sizes };
            for dtype in &self.dtypes {
                wants.extend(sizes.iter().map(|&head_size| Want {
                    kind,
                    dtype,
                    head_size,
                    sliding_window: self.sliding_window && !kind.is_mla(),
                    soft_cap: self.soft_cap && !kind.is_mla(),
                    arch: Some(&self.arch),
                }));
            }
        }
        if wants.is_empty() {
            return ask("nothing: give --head-size 64, 128 or 256, or --mla".into());
        }
        Ok(wants)
    }
}

/// What a build did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BuildReport {
    /// Files that were built.
    pub built: Vec<PathBuf>,
    /// Files that were there.
    pub present: Vec<PathBuf>,
}

/// Builds what is asked for and not there. `say` gets a line for each thing done.
///
/// # Errors
/// [`BuildError`]: what is missing, or what the compiler says.
pub fn build(
    options: &BuildOptions,
    tools: &Toolchain,
    say: &mut (dyn FnMut(String) + Send),
) -> Result<BuildReport, BuildError> {
    let mut report = BuildReport::default();
    let objects = options.folder.join(".build");
    fs::create_dir_all(&objects).map_err(|e| BuildError::file(&objects, e))?;
    // Builds of one folder take turns: they share objects. The second then finds what the first has built.
    let lock = objects.join(".lock");
    let turn = fs::File::create(&lock).map_err(|e| BuildError::file(&lock, e))?;
    if turn.try_lock().is_err() {
        say(format!("another build in {} is under way; waiting for its end", options.folder.display()));
        turn.lock().map_err(|e| BuildError::file(&lock, e))?;
    }
    let mut folder = ModuleFolder::open(&options.folder)?;
    let mut jobs = vec![];
    for want in options.wants()? {
        let there = folder.find(&want).filter(|e| folder.check(e).is_ok());
        if let Some(entry) = there {
            say(format!("{} is there", entry.file));
            report.present.push(folder.file(entry));
            continue;
        }
        jobs.push(Job::new(want, options, tools)?);
    }
    let units: Vec<Unit> = jobs.iter().flat_map(|j| j.units.iter().cloned()).collect();
    compile_all(&units, tools, options.jobs, say)?;
    for job in &jobs {
        let entry = job.finish(&options.folder, tools)?;
        say(format!("{}: linked, {} functions, {} bytes", entry.file, entry.functions.len(), entry.bytes));
        report.built.push(options.folder.join(&entry.file));
        folder.put(entry)?;
        let _ = fs::remove_dir_all(&job.work);
    }
    Ok(report)
}

/// A module on its way: its sources lie in a folder that is named by all that the objects depend on.
struct Job<'a> {
    want: Want<'a>,
    work: PathBuf,
    units: Vec<Unit>,
}

impl<'a> Job<'a> {
    fn new(want: Want<'a>, options: &BuildOptions, tools: &Toolchain) -> Result<Self, BuildError> {
        let sources = Sources::of(&want, tools)?;
        let flags = compile::flags(want.arch.unwrap_or_default());
        let key = format!("{}\n{}\n{}", tools.nvcc_version, flags.join(" "), sources.fingerprint());
        let name = format!("{}-{}", want.file().trim_end_matches(".so"), &sha256(key.as_bytes())[..12]);
        let work = options.folder.join(".build").join(name);
        sources.write(&work)?;
        let module = want.file();
        let units = sources.units().map(|source| Unit {
            module: module.clone(),
            object: work.join(source).with_extension("o"),
            source: work.join(source),
            flags: flags.clone(),
        });
        Ok(Self { want, units: units.collect(), work })
    }

    fn finish(&self, folder: &Path, tools: &Toolchain) -> Result<Entry, BuildError> {
        let linked = self.work.join("module.so");
        let objects: Vec<&Path> = self.units.iter().map(|u| u.object.as_path()).collect();
        link(&objects, &linked, tools)?;
        let functions = Module::arities(&linked, self.want.kind.functions())?.into_iter().collect();
        let bytes = fs::read(&linked).map_err(|e| BuildError::file(&linked, e))?;
        let to = folder.join(self.want.file());
        fs::rename(&linked, &to).map_err(|e| BuildError::file(&to, e))?;
        Ok(Entry {
            file: self.want.file(),
            kind: self.want.kind,
            dtype: self.want.dtype.into(),
            head_size: self.want.head_size,
            sliding_window: self.want.sliding_window,
            soft_cap: self.want.soft_cap,
            masks: vec![Mask::None, Mask::Causal],
            arch: self.want.arch.unwrap_or_default().into(),
            flashinfer: FLASHINFER.into(),
            recipe: RECIPE,
            nvcc: tools.nvcc_version.clone(),
            bytes: bytes.len() as u64,
            sha256: sha256(&bytes),
            functions,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(arch: &str) -> BuildOptions {
        BuildOptions {
            folder: PathBuf::new(),
            head_sizes: vec![64, 128],
            mla: false,
            dtypes: vec!["bfloat16".into()],
            arch: arch.into(),
            sliding_window: false,
            soft_cap: false,
            kinds: vec![],
            jobs: 1,
        }
    }

    #[test]
    fn an_architecture_gets_the_kinds_that_it_has() {
        let files = |o: &BuildOptions| o.wants().unwrap().iter().map(Want::file).collect::<Vec<_>>();
        assert_eq!(
            files(&options("sm_90a")),
            [
                "flashinfer-fa2-bfloat16-d64-sm_90a.so",
                "flashinfer-fa2-bfloat16-d128-sm_90a.so",
                "flashinfer-fa3-bfloat16-d64-sm_90a.so",
                "flashinfer-fa3-bfloat16-d128-sm_90a.so",
            ]
        );
        assert_eq!(files(&options("sm_80")).len(), 2);
        let latent =
            BuildOptions { head_sizes: vec![], mla: true, sliding_window: true, ..options("sm_90a") };
        assert_eq!(
            files(&latent),
            ["flashinfer-mla_fa2-bfloat16-d512-sm_90a.so", "flashinfer-mla_fa3-bfloat16-d512-sm_90a.so"]
        );
    }

    #[test]
    fn what_there_are_no_kernels_for_is_refused() {
        let refused = |o: BuildOptions, what: &str| {
            let e = o.wants().unwrap_err().to_string();
            assert!(e.contains(what), "{e}");
        };
        refused(BuildOptions { head_sizes: vec![96], ..options("sm_90a") }, "head size 96");
        refused(BuildOptions { dtypes: vec!["float32".into()], ..options("sm_90a") }, "dtype float32");
        refused(options("hopper"), "write it as sm_90a");
        refused(options("sm_75"), "sm_80 is the first");
        refused(BuildOptions { kinds: vec![Kind::Fa3], ..options("sm_80") }, "kind fa3 with --arch sm_80");
        refused(BuildOptions { head_sizes: vec![], ..options("sm_90a") }, "give --head-size");
    }
}
