//! The attention tests' kernels, compiled beforehand by several processes: one after another they take minutes.

use super::{Outcome, attention, state_space, text};
use headway_cuda::{CudaExec, CudaOptions, compile::Compiler};
use std::{
    path::PathBuf,
    process::{Command, ExitCode},
};

/// Where all of them put what they compiled.
pub fn folder() -> PathBuf {
    std::env::temp_dir().join("headway-gpu-tests-kernels")
}

/// `JOBS` starts that many of `I JOBS`, which compile each JOBS-th kernel from the I-th on.
pub fn run(args: &[String]) -> ExitCode {
    let number = |i: usize| args.get(i).and_then(|a| a.parse::<usize>().ok());
    let done = match (number(0), number(1)) {
        (Some(i), Some(jobs)) => some(i, jobs),
        (jobs, _) => all(jobs.unwrap_or(1)),
    };
    match done {
        Ok(found) => {
            println!("{found}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            println!("{e}");
            ExitCode::FAILURE
        }
    }
}

fn some(i: usize, jobs: usize) -> Outcome {
    let cx = CudaExec::open(CudaOptions::default()).map_err(text)?;
    let compiler = Compiler::new(cx.info().arch(), Some(folder()), None).map_err(text)?;
    let mut specs = attention::specs(cx.info()).map_err(text)?;
    specs.extend(state_space::specs(cx.info())?);
    let mine: Vec<_> = specs.iter().skip(i).step_by(jobs.max(1)).collect();
    for spec in &mine {
        compiler.cubin(spec.file, &spec.defines).map_err(text)?;
    }
    Ok(format!("{} kernels", mine.len()))
}

fn all(jobs: usize) -> Outcome {
    let program = std::env::current_exe().map_err(text)?;
    let start =
        |i: usize| Command::new(&program).args(["--compile", &i.to_string(), &jobs.to_string()]).spawn();
    let started: Vec<_> = (0..jobs).map(start).collect();
    for child in started {
        let status = child.and_then(|mut c| c.wait()).map_err(text)?;
        if !status.success() {
            return Err(format!("a compiling process ended with {status}"));
        }
    }
    Ok(format!("compiled by {jobs} processes"))
}
