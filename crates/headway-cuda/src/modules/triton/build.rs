//! From `csrc/triton/` to a folder of kernels: the user's `python3`, with Triton, compiles what is not there. No GPU and no
//! torch is needed, and nothing of Python afterwards.

use super::{
    Form, SOURCES, TRITON, TritonEntry, TritonError, TritonFolder, TritonWant, WantOf, cubin, error::said,
    recipe,
};
use crate::{compile::Arch, device::shared_per_block, modules::folder::sha256};
use serde::Deserialize;
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, SystemTime},
};

/// The largest head.
const MAX_HEAD: usize = 256;
/// What a build works in, until it is through.
const WORK: &str = ".triton-";
/// How old such a folder is when no build is still at work in it.
const ABANDONED: Duration = Duration::from_secs(3600);

/// What to build.
#[derive(Clone, Debug)]
pub struct TritonBuild {
    /// The folder of kernels; made where it is not there.
    pub folder: PathBuf,
    /// Heads' sizes.
    pub head_sizes: Vec<usize>,
    /// Element types: `bfloat16`, `float16`.
    pub dtypes: Vec<String>,
    /// The architecture (`sm_90a`).
    pub arch: String,
    /// With a cap on the scores.
    pub soft_cap: bool,
    /// For latent attention too.
    pub mla: bool,
    /// A folder of Python packages; `None`: where `python3` finds them.
    pub packages: Option<PathBuf>,
}

/// What a build did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TritonReport {
    /// Files that were built.
    pub built: Vec<PathBuf>,
    /// Files that were there.
    pub present: Vec<PathBuf>,
}

impl TritonBuild {
    /// Every kernel that is asked for.
    ///
    /// # Errors
    /// A head size, type or architecture that there is no kernel for; nothing asked for.
    pub fn forms(&self) -> Result<Vec<Form<'_>>, TritonError> {
        let ask = |what: String| Err(TritonError::Asked(what));
        if let Some(n) = self.head_sizes.iter().find(|&&n| n == 0 || n > MAX_HEAD || n % 8 != 0) {
            return ask(format!("head size {n}: multiples of 8 up to {MAX_HEAD} are supported"));
        }
        if let Some(d) = self.dtypes.iter().find(|d| !["bfloat16", "float16"].contains(&d.as_str())) {
            return ask(format!("dtype {d}: kernels are built for bfloat16 and float16"));
        }
        capability(&self.arch)?;
        let paged = self.head_sizes.iter().map(|&n| WantOf::Paged { head_size: n, soft_cap: self.soft_cap });
        let of: Vec<_> = paged.chain(self.mla.then_some(WantOf::Latent)).collect();
        if of.is_empty() {
            return Err(TritonError::Nothing);
        }
        let mut forms = vec![];
        for dtype in &self.dtypes {
            for &of in &of {
                let want = TritonWant { dtype, of, arch: Some(&self.arch) };
                forms.extend(want.kinds().iter().map(|&kind| want.form(kind)));
            }
        }
        Ok(forms)
    }
}

/// The number of an architecture as Triton counts them, and the bytes of shared memory that a block has on it.
fn capability(arch: &str) -> Result<(u32, usize), TritonError> {
    let known = Arch::KNOWN.iter().find(|a| a.to_string() == arch).map(|a| a.capability());
    match known.and_then(|c| Some((c, shared_per_block(c)?))) {
        Some(((major, minor), shared)) => Ok((major * 10 + minor, shared)),
        None => Err(TritonError::Asked(format!(
            "for architecture {}: {} are supported",
            said(arch),
            Arch::KNOWN.map(|a| a.to_string()).join(", ")
        ))),
    }
}

/// A form as `compile.py` answers.
#[derive(Debug, Deserialize)]
struct Compiled {
    name: String,
    function: String,
    shared: u32,
    num_warps: u32,
    num_stages: u32,
    /// Where its steps have some; fewer than were asked for where so many don't fit.
    keys: Option<usize>,
    num_ctas: u32,
    global_scratch: u64,
    profile_scratch: u64,
    arguments: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Answer {
    triton: String,
    forms: Vec<Compiled>,
}

/// Builds what is asked for and not there. `say` gets a line for each thing done.
///
/// # Errors
/// What is missing, or what Triton says.
pub fn build_triton(options: &TritonBuild, say: &mut dyn FnMut(String)) -> Result<TritonReport, TritonError> {
    let forms = options.forms()?;
    fs::create_dir_all(&options.folder).map_err(|e| TritonError::file(&options.folder, &e))?;
    // Builds of one folder take turns: the second finds what the first has built.
    let lock = options.folder.join(".triton.lock");
    let turn = fs::File::create(&lock).map_err(|e| TritonError::file(&lock, &e))?;
    if turn.try_lock().is_err() {
        say(format!("another build in {} is under way; waiting for its end", options.folder.display()));
        turn.lock().map_err(|e| TritonError::file(&lock, &e))?;
    }
    sweep(&options.folder);
    let mut folder = TritonFolder::open(&options.folder)?;
    let mut report = TritonReport::default();
    let mut missing = vec![];
    for form in forms {
        match folder.find(&form, Some(&options.arch)).filter(|e| folder.code(e, None).is_ok()) {
            Some(entry) => {
                say(format!("{} is there", entry.file));
                report.present.push(options.folder.join(&entry.file));
            }
            None => missing.push(form),
        }
    }
    if missing.is_empty() {
        return Ok(report);
    }
    let work = tempfile::Builder::new().prefix(WORK).tempdir_in(&options.folder);
    let work = work.map_err(|e| TritonError::file(&options.folder, &e))?;
    let answer = compile(options, &missing, work.path(), say)?;
    let mut entries = vec![];
    for form in &missing {
        let entry = finish(options, form, &answer, work.path())?;
        say(format!("{}: {} bytes, {} bytes of shared memory", entry.file, entry.bytes, entry.shared));
        report.built.push(options.folder.join(&entry.file));
        entries.push(entry);
    }
    folder.put(entries)?;
    Ok(report)
}

/// Removes what interrupted builds worked in. This build has its turn, so no other is at work; a compiler whose build was
/// killed gets an hour.
fn sweep(folder: &Path) {
    let Ok(all) = fs::read_dir(folder) else { return };
    for at in all.flatten() {
        let ours = at.file_name().to_str().is_some_and(|n| n.starts_with(WORK));
        let Ok(of) = at.metadata() else { continue };
        let old =
            of.modified().is_ok_and(|t| SystemTime::now().duration_since(t).is_ok_and(|age| age > ABANDONED));
        if ours && of.is_dir() && old {
            // What can't be removed is in nobody's way.
            let _ = fs::remove_dir_all(at.path());
        }
    }
}

/// What a compiler wrote to both of its outputs until its end; `line` is called on each line of standard error.
fn both(child: &mut Child, line: &mut dyn FnMut(&str)) -> std::io::Result<(Vec<u8>, Vec<String>)> {
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let answer = thread::spawn(move || -> std::io::Result<Vec<u8>> {
        let mut all = vec![];
        out.map(|mut o| o.read_to_end(&mut all)).transpose()?;
        Ok(all)
    });
    let mut lines = vec![];
    if let Some(err) = err {
        for words in BufReader::new(err).split(b'\n') {
            let words = String::from_utf8_lossy(&words?).into_owned();
            line(&words);
            lines.push(words);
        }
    }
    let all = answer.join().map_err(|_| std::io::Error::other("its answer was not read"))??;
    Ok((all, lines))
}

/// Runs Python on the missing forms.
fn compile(
    options: &TritonBuild,
    missing: &[Form<'_>],
    work: &Path,
    say: &mut dyn FnMut(String),
) -> Result<Answer, TritonError> {
    // Triton reads the text of a kernel where it was imported from.
    for (name, text) in SOURCES {
        let to = work.join(name);
        fs::write(&to, text).map_err(|e| TritonError::file(&to, &e))?;
    }
    let (arch, shared) = capability(&options.arch)?;
    let orders: Vec<_> = missing.iter().map(|f| f.order(&options.arch)).collect();
    let order = serde_json::json!({
        "triton": TRITON, "arch": arch, "shared": shared, "out": work, "forms": orders,
    });
    let mut python = Command::new("python3");
    python.arg(work.join("compile.py")).env("TRITON_CACHE_DIR", work.join("cache"));
    // Lines of a source that is gone when the kernel runs.
    python.env_remove("TRITON_INTERPRET").env("TRITON_DISABLE_LINE_INFO", "1");
    if let Some(packages) = &options.packages {
        python.env("PYTHONPATH", packages);
    }
    let lacking = |what: &str, words: String| TritonError::Lacking { what: what.into(), words };
    let pipes = python.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = pipes.map_err(|e| lacking("python3", e.to_string()))?;
    if let Some(mut to) = child.stdin.take() {
        // A Python that ended early says why on its own.
        let _ = to.write_all(order.to_string().as_bytes());
    }
    let mut begun = false;
    let heard = both(&mut child, &mut |line| {
        // Triton is there, and of this version: Python names the first kernel.
        if !begun && line.starts_with("triton-") {
            begun = true;
            let (n, s) = (missing.len(), if missing.len() == 1 { "" } else { "s" });
            say(format!("compiling {n} kernel{s} for {} with Triton {TRITON}", options.arch));
        }
    });
    let (out, lines) = heard.map_err(|e| lacking("python3", e.to_string()))?;
    let status = child.wait().map_err(|e| lacking("python3", e.to_string()))?;
    if !status.success() {
        let last = lines.iter().rev().find(|l| !l.trim().is_empty());
        let last = last.map_or("it said nothing".into(), |l| said(l.trim_end()));
        if last.contains("No module named 'triton'") {
            return Err(lacking("the Python package triton", last));
        }
        let form = lines.iter().rev().find(|l| l.starts_with("triton-"));
        return Err(TritonError::Compiler {
            form: form.map_or("its start".into(), |f| said(f)),
            words: last,
        });
    }
    let answer: Answer = serde_json::from_slice(&out)
        .map_err(|e| TritonError::Compiler { form: "its answer".into(), words: said(&e.to_string()) })?;
    if answer.triton != TRITON {
        let at = options.packages.as_ref().map_or("python3".into(), |p| p.display().to_string());
        return Err(TritonError::Version { at, found: said(&answer.triton) });
    }
    Ok(answer)
}

/// Checks what was compiled, and moves it to its place.
fn finish(
    options: &TritonBuild,
    form: &Form<'_>,
    answer: &Answer,
    work: &Path,
) -> Result<TritonEntry, TritonError> {
    let name = form.name(&options.arch);
    let refuse = |why: String| TritonError::Launch { form: name.clone(), why };
    let made = answer.forms.iter().find(|f| f.name == name);
    let made = made.ok_or_else(|| refuse("Triton did not answer for it".into()))?;
    let (_, most) = capability(&options.arch)?;
    for (wrong, why) in [
        (made.num_ctas != 1, format!("clusters of {} blocks", made.num_ctas)),
        (made.global_scratch + made.profile_scratch > 0, "scratch memory".into()),
        (made.shared as usize > most, format!("{} bytes of shared memory of {most}", made.shared)),
        (made.function != form.kind.function(), format!("a function {}", made.function)),
        (made.arguments != form.arguments(), format!("arguments ({})", made.arguments.join(", "))),
    ] {
        if wrong {
            return Err(refuse(why));
        }
    }
    let file = format!("{name}.cubin");
    let (from, to) = (work.join(&file), options.folder.join(&file));
    let bytes = fs::read(&from).map_err(|e| TritonError::file(&from, &e))?;
    cubin::check(&bytes, &made.function).map_err(refuse)?;
    // Nothing is renamed over a folder.
    if to.is_dir() {
        return Err(TritonError::NotFile { path: to });
    }
    fs::rename(&from, &to).map_err(|e| TritonError::file(&to, &e))?;
    let entry = TritonEntry {
        file,
        function: made.function.clone(),
        kind: form.kind,
        dtype: form.dtype.into(),
        head_size: form.head_size,
        soft_cap: form.soft_cap,
        arch: options.arch.clone(),
        rows: form.rows(),
        keys: made.keys.unwrap_or(form.keys()),
        num_warps: made.num_warps,
        num_stages: made.num_stages,
        shared: made.shared,
        arguments: made.arguments.clone(),
        triton: answer.triton.clone(),
        recipe: recipe().into(),
        bytes: bytes.len() as u64,
        sha256: sha256(&bytes),
        sum: String::new(),
    }
    .sealed();
    match entry.other_sources() {
        Some(what) => Err(refuse(what)),
        None => Ok(entry),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> TritonBuild {
        TritonBuild {
            folder: PathBuf::new(),
            head_sizes: vec![64],
            dtypes: vec!["bfloat16".into()],
            arch: "sm_90a".into(),
            soft_cap: false,
            mla: false,
            packages: None,
        }
    }

    #[test]
    fn what_there_are_no_kernels_for_is_refused() {
        assert_eq!(options().forms().unwrap().len(), 4);
        assert_eq!(TritonBuild { mla: true, ..options() }.forms().unwrap().len(), 7);
        assert_eq!(TritonBuild { mla: true, head_sizes: vec![], ..options() }.forms().unwrap().len(), 3);
        let refused = |o: TritonBuild, what: &str| {
            let e = o.forms().unwrap_err().to_string();
            assert!(e.contains(what), "{e}");
        };
        refused(TritonBuild { head_sizes: vec![12], ..options() }, "head size 12: multiples of 8");
        refused(TritonBuild { head_sizes: vec![264], ..options() }, "up to 256");
        refused(TritonBuild { head_sizes: vec![], ..options() }, "name what to build: --head-size or --mla");
        refused(TritonBuild { dtypes: vec!["float32".into()], ..options() }, "dtype float32");
        for arch in
            ["sm_75", "hopper", "sm_90", "sm_90afaf", "sm_+90", "sm_999", "sm_80a", "SM_80", "sm_080", ""]
        {
            let all =
                "sm_80, sm_86, sm_87, sm_89, sm_90a, sm_100a, sm_103, sm_110, sm_120, sm_121 are supported";
            refused(TritonBuild { arch: arch.into(), ..options() }, all);
        }
        for arch in Arch::KNOWN {
            // As a device of it asks for its kernels.
            let (major, minor) = arch.capability();
            let (number, shared) = capability(&arch.to_string()).unwrap();
            assert_eq!((number, Some(shared)), (major * 10 + minor, shared_per_block((major, minor))));
        }
    }

    #[test]
    fn what_interrupted_builds_left_is_swept_after_an_hour() {
        let dir = tempfile::tempdir().unwrap();
        let [old, fresh, other] = [".triton-old", ".triton-new", "triton-x"].map(|n| dir.path().join(n));
        for at in [&old, &fresh, &other] {
            fs::create_dir(at).unwrap();
            fs::write(at.join("compile.py"), "").unwrap();
        }
        let hours = SystemTime::now() - 2 * ABANDONED;
        for at in [&old, &other] {
            fs::File::open(at).unwrap().set_modified(hours).unwrap();
        }
        let lock = dir.path().join(".triton.lock");
        fs::File::create(&lock).unwrap().set_modified(hours).unwrap();
        sweep(dir.path());
        assert_eq!([&old, &fresh, &other, &lock].map(|at| at.exists()), [false, true, true, true]);
    }
}
