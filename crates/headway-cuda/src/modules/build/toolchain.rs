//! What a build needs, found once: FlashInfer's package with the headers that it carries, TVM-FFI's headers, nvcc with
//! its runtime, and the C++ compiler that links.

use super::BuildError;
use crate::modules::FLASHINFER;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Where to look first.
#[derive(Clone, Debug, Default)]
pub struct ToolchainOptions {
    /// A folder of Python packages (`site-packages`); where it is not given, `python3` is asked.
    pub packages: Option<PathBuf>,
    /// The compiler.
    pub nvcc: Option<PathBuf>,
}

/// The tools and where headers lie.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// FlashInfer's `data` folder: sources, templates, headers.
    pub data: PathBuf,
    /// TVM-FFI's `include` folder.
    pub tvm_include: PathBuf,
    /// The compiler.
    pub nvcc: PathBuf,
    /// Its version (`13.0.88`).
    pub nvcc_version: String,
    /// The folder of `libcudart_static.a`.
    pub cudart: PathBuf,
    /// The C++ compiler.
    pub cxx: String,
}

/// FlashInfer's headers for Hopper, in its `data` folder.
pub(super) const HOPPER: &str = "include/flashinfer/attention/hopper";

const NVCC_PACKAGES: &str = "install NVIDIA's CUDA toolkit, or: pip install nvidia-cuda-nvcc==13.0.88 \
     nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'; \
     or give --nvcc PATH";

impl Toolchain {
    /// Finds everything.
    ///
    /// # Errors
    /// What is missing, where it was looked for and how to get it.
    pub fn find(options: &ToolchainOptions) -> Result<Self, BuildError> {
        let flashinfer = package("flashinfer", options)?;
        let data = flashinfer.join("data");
        let found = version(&flashinfer);
        if found != FLASHINFER {
            return Err(BuildError::Version { path: flashinfer, found });
        }
        let tvm_include = package("tvm_ffi", options)?.join("include");
        for (folder, file) in [(&data, "csrc/batch_prefill.cu"), (&tvm_include, "tvm/ffi/c_api.h")] {
            if !folder.join(file).is_file() {
                return Err(lacking(file, &folder.display().to_string(), "install the package again"));
            }
        }
        let nvcc = nvcc(options)?;
        let nvcc_version = nvcc_version(&nvcc)?;
        let cudart = cudart(&nvcc)?;
        let cxx = std::env::var("CXX").ok().filter(|v| !v.is_empty()).unwrap_or_else(|| "g++".into());
        if !runs(Path::new(&cxx), "--version") {
            let remedy = "install a C++ compiler (apt install g++), or name one in CXX";
            return Err(lacking("a C++ compiler", &cxx, remedy));
        }
        Ok(Self { data, tvm_include, nvcc, nvcc_version, cudart, cxx })
    }

    /// Include folders: those before the compiler's own, and those after.
    pub(super) fn includes(&self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let of = |sub: &str| self.data.join(sub);
        let first = ["cccl/cub", "cccl/libcudacxx/include", "cccl/thrust"].map(of).to_vec();
        // The last is where the mended epilogue's neighbours lie.
        let rest =
            ["include", "csrc", "cutlass/include", "cutlass/tools/util/include", "spdlog/include", HOPPER]
                .map(of);
        (first, [std::slice::from_ref(&self.tvm_include), &rest].concat())
    }
}

fn lacking(what: &str, tried: &str, remedy: &str) -> BuildError {
    BuildError::Lacking { what: what.into(), tried: tried.into(), remedy: remedy.into() }
}

/// A Python package's folder.
fn package(name: &str, options: &ToolchainOptions) -> Result<PathBuf, BuildError> {
    let remedy = format!(
        "pip install --no-deps flashinfer-python=={FLASHINFER} 'apache-tvm-ffi==0.1.*', or give --packages FOLDER, the \
         site-packages that has them"
    );
    if let Some(packages) = &options.packages {
        let folder = packages.join(name);
        let shown = folder.display().to_string();
        return folder.is_dir().then_some(folder).ok_or_else(|| lacking(name, &shown, &remedy));
    }
    // Finds it without importing it.
    let ask = "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); print(s.submodule_search_locations[0])";
    let answer = Command::new("python3").args(["-c", ask, name]).output();
    let folder = answer.ok().filter(|a| a.status.success()).and_then(|a| String::from_utf8(a.stdout).ok());
    let folder = folder.map(|f| PathBuf::from(f.trim())).filter(|f| f.is_dir());
    folder.ok_or_else(|| lacking(&format!("the Python package {name}"), "python3 does not find it", &remedy))
}

/// FlashInfer's version, of the file that its build writes, or of the name of its metadata.
fn version(package: &Path) -> String {
    let text = fs::read_to_string(package.join("_build_meta.py")).unwrap_or_default();
    let quoted = text.lines().find_map(|l| l.strip_prefix("__version__")?.split(['"', '\'']).nth(1));
    if let Some(v) = quoted {
        return v.to_owned();
    }
    let siblings = package.parent().and_then(|p| fs::read_dir(p).ok()).into_iter().flatten().flatten();
    let named = siblings.filter_map(|f| {
        let name = f.file_name().into_string().ok()?;
        Some(name.strip_prefix("flashinfer_python-")?.strip_suffix(".dist-info")?.to_owned())
    });
    named.min().unwrap_or_else(|| "of no known version".into())
}

fn nvcc(options: &ToolchainOptions) -> Result<PathBuf, BuildError> {
    let mut places = vec![];
    match &options.nvcc {
        Some(given) => places.push(given.clone()),
        None => {
            places.extend(options.packages.iter().map(|p| p.join("nvidia/cu13/bin/nvcc")));
            places.push("nvcc".into());
            places.push("/usr/local/cuda/bin/nvcc".into());
            places.extend(package("nvidia", options).ok().map(|p| p.join("cu13/bin/nvcc")));
        }
    }
    let works = places.iter().find(|p| runs(p, "--version"));
    let Some(found) = works else {
        let tried: Vec<_> = places.iter().map(|p| p.display().to_string()).collect();
        return Err(lacking("nvcc", &tried.join(", "), NVCC_PACKAGES));
    };
    // A bare name: where it lies says where its runtime is.
    Ok(match found.components().count() {
        1 => on_path(found).unwrap_or_else(|| found.clone()),
        _ => found.clone(),
    })
}

fn on_path(name: &Path) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|d| d.join(name)).find(|p| p.is_file())?;
    found.canonicalize().ok()
}

fn runs(tool: &Path, flag: &str) -> bool {
    Command::new(tool).arg(flag).output().is_ok_and(|o| o.status.success())
}

/// `13.0.88`, of `Cuda compilation tools, release 13.0, V13.0.88`.
fn nvcc_version(nvcc: &Path) -> Result<String, BuildError> {
    let output = Command::new(nvcc).arg("--version").output().map_err(|e| BuildError::file(nvcc, e))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split(", V").nth(1).and_then(|t| t.split_whitespace().next()).map(str::to_owned);
    let version = version.ok_or_else(|| lacking("nvcc's version", &text, "give another with --nvcc PATH"))?;
    match version.split('.').next().and_then(|m| m.parse::<u32>().ok()) {
        Some(major) if major >= 13 => Ok(version),
        _ => Err(lacking("nvcc 13 or later", &format!("{} is {version}", nvcc.display()), NVCC_PACKAGES)),
    }
}

fn cudart(nvcc: &Path) -> Result<PathBuf, BuildError> {
    let root = nvcc.parent().and_then(Path::parent).unwrap_or(Path::new("/usr/local/cuda"));
    let places = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"].map(|p| root.join(p));
    let found = places.iter().find(|p| p.join("libcudart_static.a").is_file());
    found.cloned().ok_or_else(|| lacking("libcudart_static.a", &root.display().to_string(), NVCC_PACKAGES))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of packages of this version, with an nvcc that answers `nvcc`.
    fn packages(version: &str, nvcc: &str) -> tempfile::TempDir {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            path
        };
        file("flashinfer/_build_meta.py", &format!("__version__ = \"{version}\"\n"));
        file("flashinfer/data/csrc/batch_prefill.cu", "");
        file("tvm_ffi/include/tvm/ffi/c_api.h", "");
        file("nvidia/cu13/lib/libcudart_static.a", "");
        let tool = file("nvidia/cu13/bin/nvcc", &format!("#!/bin/sh\necho 'release, V{nvcc}'\n"));
        fs::set_permissions(tool, fs::Permissions::from_mode(0o755)).unwrap();
        folder
    }

    fn find(folder: &Path, nvcc: Option<PathBuf>) -> Result<Toolchain, BuildError> {
        Toolchain::find(&ToolchainOptions { packages: Some(folder.to_owned()), nvcc })
    }

    #[test]
    fn packages_in_one_folder_are_enough() {
        let folder = packages(FLASHINFER, "13.0.88");
        let tools = find(folder.path(), None).unwrap();
        assert_eq!(tools.nvcc_version, "13.0.88");
        assert_eq!(tools.cudart, folder.path().join("nvidia/cu13/lib"));
        for include in ["cutlass/include", HOPPER] {
            assert!(tools.includes().1.contains(&folder.path().join("flashinfer/data").join(include)));
        }
    }

    #[test]
    fn what_is_missing_is_named_with_how_to_get_it() {
        let says = |r: Result<Toolchain, BuildError>, parts: &[&str]| {
            let e = r.unwrap_err().to_string();
            assert!(parts.iter().all(|p| e.contains(p)), "{e}");
        };
        let folder = packages("0.8.0", "13.0.88");
        says(find(folder.path(), None), &["FlashInfer 0.8.0 at", "flashinfer-python==0.7.4"]);
        let folder = packages(FLASHINFER, "12.8.1");
        says(find(folder.path(), None), &["nvcc 13 or later", "is 12.8.1", "pip install nvidia-cuda-nvcc"]);
        says(
            find(folder.path(), Some("/nowhere/nvcc".into())),
            &["nvcc was not found (/nowhere/nvcc)", "--nvcc PATH"],
        );
        fs::remove_dir_all(folder.path().join("tvm_ffi")).unwrap();
        says(find(folder.path(), None), &["tvm_ffi was not found", "apache-tvm-ffi"]);
        fs::remove_dir_all(folder.path().join("flashinfer")).unwrap();
        says(find(folder.path(), None), &["flashinfer was not found", "--packages FOLDER"]);
    }
}
