//! `--config FILE`: TOML with one `[backend.NAME]` table a backend.

use super::CliError;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct File {
    backend: Map<String, Value>,
}

/// The backends' tables; none without a file. Fields are checked by the backend that reads them.
pub fn backend_tables(path: Option<&Path>) -> Result<Map<String, Value>, CliError> {
    let Some(path) = path else { return Ok(Map::new()) };
    let bad = |why: String| CliError::File { path: path.into(), why };
    let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
    let file: File = toml::from_str(&text).map_err(|e| bad(e.message().to_owned()))?;
    Ok(file.backend)
}
