//! `bench attention --from-stdin`: another program says what is measured next and when, so that it can
//! measure others in between. What is asked for again goes on where it was.

use super::{
    super::{
        super::CliError,
        cases::{Case, CaseFile, Heads},
        meter,
    },
    Bench, Run, element, heading,
    layer::Prepared,
    show,
};
use headway_tensor::DType;
use std::io::BufRead;

/// Reads names until there are no more, and answers each with a measurement.
///
/// # Errors
/// A name that is not in the file; several thread counts or block sizes; the backend's own.
pub fn run(bench: &Bench<'_>) -> Result<(), CliError> {
    let a = bench.args;
    let one = |what: &str, given: &[usize]| match given {
        [] | [_] => Ok(given.first().copied()),
        _ => Err(CliError::Usage(format!("--from-stdin measures with one {what}: give only one"))),
    };
    let (threads, block_size) = (one("--threads", &a.threads)?, one("--block-size", &a.block_size)?);
    let device = bench.open(threads)?;
    let meter = meter::of(&*device.ops)?;
    let ceilings = meter.ceilings()?;
    let mut pool = bench.pool(&device, &*meter)?;
    if !a.json {
        heading(&device, &ceilings)?;
    }
    let mut last: Option<(String, Prepared<'_>)> = None;
    for line in std::io::stdin().lock().lines() {
        let name = line.map_err(|e| CliError::Usage(format!("standard input: {e}")))?;
        let mut prepared = match last.take() {
            Some((of, prepared)) if of == name => prepared,
            _ => {
                let (case, heads, dtype) = find(&bench.file, &name)?;
                let none =
                    || CliError::Usage(format!("standard input: {name:?}: no backend for these heads"));
                let &(ref backend, layout) = bench.backends(heads).next().ok_or_else(none)?;
                let run = Run { backend, layout, heads, dtype, block_size, case };
                let setup = bench.setup(&run, &device, &*meter, &ceilings);
                Prepared::new(setup, case, &pool)?
            }
        };
        show(&prepared.measure(a.repetitions, &mut pool)?, a.json)?;
        last = Some((name, prepared));
    }
    Ok(())
}

/// A name's case, heads and dtype.
fn find<'f>(file: &'f CaseFile, name: &str) -> Result<(&'f Case, &'f Heads, DType), CliError> {
    let wrong = |why: &str| CliError::Usage(format!("standard input: {name:?}: {why}"));
    let [case, heads, dtype] = name.split_whitespace().collect::<Vec<_>>()[..] else {
        return Err(wrong("a line is a case, heads and a dtype, such as decode_b1_c512 32/8/128 bf16"));
    };
    let case = file.cases.iter().find(|c| c.id == case).ok_or_else(|| wrong("no such case in the file"))?;
    let heads =
        file.heads.iter().find(|h| h.id == heads).ok_or_else(|| wrong("no such heads in the file"))?;
    let dtype = element(dtype).map_err(|e| wrong(&e))?;
    Ok((case, heads, dtype))
}
