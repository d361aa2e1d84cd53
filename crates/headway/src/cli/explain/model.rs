//! The model that is asked about, by whatever it was named.

use super::super::CliError;
use headway_engine::{
    explain::Subject,
    options::LoadFormat,
    sources::{self, FetchOptions, ModelSpec, NoProgress},
};

/// Finds and reads a model without fetching anything.
pub fn read(name: &str, load_format: LoadFormat) -> Result<Subject, CliError> {
    let path = match ModelSpec::parse(name)? {
        ModelSpec::Path(path) => path,
        spec => {
            let offline =
                FetchOptions { hub_offline: true, pip_command: vec![], ..FetchOptions::from_env()? };
            let found = sources::resolve(&spec, &offline, &NoProgress);
            let missing = |_| {
                CliError::Usage(format!(
                    "{name} is not in the cache and explain fetches nothing; run headway pull {name} first, or give the path \
                     of its config.json"
                ))
            };
            found.map_err(missing)?.path
        }
    };
    Ok(Subject::read(&path, load_format)?)
}
