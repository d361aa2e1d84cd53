//! Runs the program and looks at what came of it; copies and spoils checkpoints.

use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use tempfile::TempDir;

/// What a run left behind.
pub struct Run {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// The program, with none of the environment's settings, no network, no kernel modules and no input.
pub fn headway() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_headway"));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|n| n.starts_with("HEADWAY_") || n.starts_with("HF_")) {
            c.env_remove(name);
        }
    }
    c.env_remove("RUST_BACKTRACE")
        .env("HF_HUB_OFFLINE", "1")
        .env("HEADWAY_THREADS", "1")
        .env("HEADWAY_KERNELS_DIR", "/nowhere")
        .stdin(Stdio::null());
    c
}

pub fn finish(c: &mut Command) -> Run {
    let o = c.output().expect("the program starts");
    let text = |b: Vec<u8>| String::from_utf8(b).expect("output is UTF-8");
    Run { code: o.status.code(), out: text(o.stdout), err: text(o.stderr) }
}

/// `headway ARGS`.
pub fn run<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Run {
    finish(headway().args(args))
}

/// `headway generate --model MODEL ARGS`.
pub fn generate(model: &Path, args: &[&str]) -> Run {
    finish(headway().arg("generate").arg("--model").arg(model).args(args))
}

impl Run {
    /// The run was refused as every bad input is: one line on standard error that has all of `words`,
    /// nothing on standard output, an exit code that isn't 0.
    #[track_caller]
    pub fn refused(&self, words: &[&str]) {
        let all = format!("exit code {:?}\nstdout: {:?}\nstderr: {}", self.code, self.out, self.err);
        assert!(matches!(self.code, Some(1 | 2)), "{all}");
        assert!(self.out.is_empty(), "{all}");
        assert!(self.err.starts_with("headway: ") && self.err.lines().count() == 1, "{all}");
        assert!(!self.err.contains("panicked") && !self.err.contains("this is a bug"), "{all}");
        for word in words {
            assert!(self.err.contains(word), "{word:?} is missing\n{all}");
        }
    }

    /// The run went well.
    #[track_caller]
    pub fn fine(self) -> Self {
        assert_eq!(self.code, Some(0), "stdout: {}\nstderr: {}", self.out, self.err);
        self
    }

    /// Standard output as JSON, an object a line.
    #[track_caller]
    pub fn objects(&self) -> Vec<Value> {
        self.out.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect()
    }

    /// The one object on standard output.
    #[track_caller]
    pub fn object(&self) -> Value {
        let mut all = self.objects();
        assert_eq!(all.len(), 1, "{}", self.out);
        all.remove(0)
    }
}

/// A checkpoint with a tokenizer and a chat template.
pub fn llama() -> PathBuf {
    headway_testkit::testdata::model_dir("tiny-llama").expect("test data")
}

/// A checkpoint without a tokenizer.
pub fn without_tokenizer() -> PathBuf {
    headway_testkit::testdata::model_dir("tiny-qwen3").expect("test data")
}

/// A copy of a checkpoint that a test may spoil.
pub struct Copy(TempDir);

impl Copy {
    pub fn of(model: &Path) -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        for entry in fs::read_dir(model).expect("the checkpoint") {
            let path = entry.expect("an entry").path();
            fs::copy(&path, dir.path().join(path.file_name().expect("a name"))).expect("copied");
        }
        Self(dir)
    }

    /// A copy of the Llama checkpoint with fields of a JSON file changed; `null` removes a field.
    pub fn with(file: &str, fields: &[(&str, Value)]) -> Self {
        Self::edited(&llama(), file, fields)
    }

    /// [`Copy::with`] of another checkpoint.
    pub fn edited(model: &Path, file: &str, fields: &[(&str, Value)]) -> Self {
        let copy = Self::of(model);
        // Configs may hold Infinity, which no JSON does.
        let mut json: Value = headway_engine::loading::json::read(&copy.file(file)).expect("JSON");
        for (name, value) in fields {
            match value {
                Value::Null => drop(json.as_object_mut().expect("an object").remove(*name)),
                v => json[*name] = v.clone(),
            }
        }
        copy.write(file, json.to_string().as_bytes());
        copy
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.file(name)).expect("the file")
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.file(name), bytes).expect("written");
    }

    pub fn remove(&self, name: &str) {
        fs::remove_file(self.file(name)).expect("removed");
    }

    /// Generates from three ids.
    pub fn generate(&self) -> Run {
        generate(self.path(), &["--prompt-ids", "1,2,3", "--max-tokens", "2"])
    }
}

/// A file with these bytes, in a folder of its own.
pub fn file(name: &str, bytes: &[u8]) -> (TempDir, PathBuf) {
    let dir = TempDir::new().expect("a temporary folder");
    let path = dir.path().join(name);
    fs::write(&path, bytes).expect("written");
    (dir, path)
}
