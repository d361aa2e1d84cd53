//! `bench attention --from-stdin`: another program says what is measured next and when, so that it can
//! measure others in between. What is asked for again goes on where it was.

use super::{
    super::super::{
        CliError,
        measure::{Case, Layer, Prepared, meter},
    },
    Bench, Line, Run, element, heading, line, show,
};
use std::io::{BufRead, Write};

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
        writeln!(std::io::stdout().lock(), "{}", line::head())?;
    }
    let mut last: Option<(String, Prepared<'_>)> = None;
    for line in std::io::stdin().lock().lines() {
        let name = line.map_err(|e| CliError::Usage(format!("standard input: {e}")))?;
        let mut prepared = match last.take() {
            Some((of, prepared)) if of == name => prepared,
            _ => {
                let (case, layer) = find(bench, &name)?;
                let none =
                    || CliError::Usage(format!("standard input: {name:?}: no backend for these heads"));
                let &(ref backend, layout) = bench.backends(layer).next().ok_or_else(none)?;
                let run = Run { backend, layout, layer, block_size, case };
                let setup = bench.setup(&run, &device, &*meter, &ceilings);
                Prepared::new(setup, case, &pool)?
            }
        };
        let measured = prepared.measure(a.repetitions, &mut pool)?;
        show(&Line::new(&prepared, measured, block_size), a.json)?;
        last = Some((name, prepared));
    }
    Ok(())
}

/// A name's case, and its heads in its dtype.
fn find<'f>(bench: &'f Bench<'_>, name: &str) -> Result<(&'f Case, &'f Layer), CliError> {
    let wrong = |why: &str| CliError::Usage(format!("standard input: {name:?}: {why}"));
    let [case, heads, dtype] = name.split_whitespace().collect::<Vec<_>>()[..] else {
        return Err(wrong("a line is a case, heads and a dtype, such as decode_b1_c512 32/8/128 bf16"));
    };
    let file = &bench.file;
    let case = file.cases.iter().find(|c| c.id == case).ok_or_else(|| wrong("no such case in the file"))?;
    let of_heads = |l: &&Layer| l.name == heads;
    bench.layers.iter().find(of_heads).ok_or_else(|| wrong("no such heads in the file"))?;
    let dtype = element(dtype).map_err(|e| wrong(&e))?;
    let in_dtype = bench.layers.iter().filter(of_heads).find(|l| l.need.dtype == dtype);
    Ok((case, in_dtype.ok_or_else(|| wrong("no such dtype"))?))
}
