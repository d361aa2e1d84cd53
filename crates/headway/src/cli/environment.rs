//! `HEADWAY_…` variables: a misspelt one is an error, never ignored.

use super::{CliError, args::Cli};
use clap::CommandFactory;
use headway_attention::process::registry::nearest;
use std::{collections::BTreeSet, ffi::OsString};

/// Variables that are no option's twin.
const OTHERS: &[&str] = &[
    "HEADWAY_CPU_ISA",
    super::args::PROFILE_VARIABLE,
    "HEADWAY_GOLDEN_DIR",
    "HEADWAY_MODELS_DIR",
    "HEADWAY_CONFORMANCE_DIR",
    headway_cuda::modules::FOLDER_VARIABLE,
];

/// Every variable that this build reads.
fn known() -> BTreeSet<String> {
    let mut names: BTreeSet<String> =
        OTHERS.iter().chain(headway_engine::sources::ENVIRONMENT).map(|s| (*s).to_owned()).collect();
    for command in Cli::command().get_subcommands() {
        names.extend(
            command.get_arguments().filter_map(|a| a.get_env()).map(|e| e.to_string_lossy().into_owned()),
        );
    }
    names
}

/// Refuses unknown `HEADWAY_…` variables.
pub fn refuse_unknown(vars: impl Iterator<Item = (OsString, OsString)>) -> Result<(), CliError> {
    let known = known();
    for (name, _) in vars {
        let name = name.to_string_lossy();
        if name.starts_with("HEADWAY_") && !known.contains(name.as_ref()) {
            let nearest = nearest(&name, known.iter().map(String::as_str));
            return Err(CliError::Environment { name: name.into_owned(), nearest });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_variable_is_refused_with_the_nearest() {
        let var = |n: &str| std::iter::once((OsString::from(n), OsString::from("1")));
        let e = refuse_unknown(var("HEADWAY_ATENTION_BACKEND")).unwrap_err().to_string();
        assert!(e.contains("(did you mean HEADWAY_ATTENTION_BACKEND?)"), "{e}");
        assert!(refuse_unknown(var("HEADWAY_THREADS")).is_ok());
        assert!(refuse_unknown(var("PATH")).is_ok());
        assert!(refuse_unknown(var("HEADWAY_PROFILE")).is_ok());
    }
}
