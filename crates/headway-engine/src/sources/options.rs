//! Where to look and how long to wait: [`FetchOptions`], and the environment variables that it is read from.
//!
//! Nothing else in this module reads the environment, so that a fetch can be run with any settings inside one process.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::error::SourceError;

/// headway's own environment variables that this module reads. The hub's variables (`HF_ENDPOINT`, `HF_HOME`,
/// `HF_HUB_CACHE`, `HF_TOKEN`, `HF_HUB_OFFLINE`) and `SSL_CERT_FILE` are read as well.
pub const ENVIRONMENT: &[&str] = &["HEADWAY_CACHE_DIR", "HEADWAY_HUB_TIMEOUT"];

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
const DEFAULT_HUB_TIMEOUT: Duration = Duration::from_secs(5);
const DEFAULT_PIP_SILENCE: Duration = Duration::from_secs(180);

/// A secret that is sent to the hub and never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct AccessToken(pub String);

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AccessToken(..)")
    }
}

/// Settings of a fetch.
#[derive(Debug, Clone)]
pub struct FetchOptions {
    /// headway's own cache folder; GGUF files lie in its folder `models`.
    pub cache_dir: PathBuf,
    /// The hub's cache folder, in the layout that all its clients share.
    pub hub_cache_dir: PathBuf,
    /// Base address of the hub.
    pub hub_endpoint: String,
    /// Access token for gated or private repositories.
    pub hub_token: Option<AccessToken>,
    /// Never ask the hub; what its cache holds is still used.
    pub hub_offline: bool,
    /// Longest wait for each of: name look-up, connection, answer, and silence within a download.
    pub hub_timeout: Duration,
    /// PEM file with the certificates to trust instead of the built-in ones.
    pub ca_file: Option<PathBuf>,
    /// The command that pip's arguments are added to, usually `python3 -m pip`. Empty: pip is not used.
    pub pip_command: Vec<OsString>,
    /// pip is stopped when nothing has arrived for this long.
    pub pip_silence: Duration,
}

impl FetchOptions {
    /// Reads the process's environment.
    ///
    /// # Errors
    /// [`SourceError::BadOption`] for a value that makes no sense, or where no variable says where a cache could be.
    pub fn from_env() -> Result<Self, SourceError> {
        Self::from_lookup(|name| std::env::var_os(name))
    }

    /// Holds the environment's values to their form without asking for a cache's folder: for a model that
    /// lies where the user says.
    ///
    /// # Errors
    /// As [`FetchOptions::from_env`], but for a home that isn't there.
    pub fn check_env() -> Result<(), SourceError> {
        let stand_in = |name: &str| (name == "HOME").then(|| OsString::from("."));
        let lookup = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).or_else(|| stand_in(name));
        Self::from_lookup(lookup).map(|_| ())
    }

    /// As [`FetchOptions::from_env`], with the environment given as a function. Empty values count as not set.
    ///
    /// # Errors
    /// As [`FetchOptions::from_env`].
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, SourceError> {
        let get = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let text = |name: &'static str| match get(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(value)) => Ok(Some(value)),
            Some(Err(value)) => Err(bad(name, value.to_string_lossy().into_owned(), "must be valid UTF-8")),
        };
        let home_cache = get("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| {
            get("HOME").or_else(|| get("USERPROFILE")).map(|home| PathBuf::from(home).join(".cache"))
        });
        let cache_dir = match (get("HEADWAY_CACHE_DIR"), &home_cache) {
            (Some(folder), _) => PathBuf::from(folder),
            (None, Some(cache)) => cache.join("headway"),
            (None, None) => return Err(no_home("HEADWAY_CACHE_DIR")),
        };
        let hub_home = match (get("HF_HOME"), &home_cache) {
            (Some(folder), _) => PathBuf::from(folder),
            (None, Some(cache)) => cache.join("huggingface"),
            (None, None) => return Err(no_home("HF_HOME")),
        };
        let hub_cache_dir = get("HF_HUB_CACHE").map_or_else(|| hub_home.join("hub"), PathBuf::from);
        let token_file = hf_hub::Cache::new(hub_home.join("hub"));
        Ok(Self {
            cache_dir,
            hub_cache_dir,
            hub_endpoint: endpoint(text("HF_ENDPOINT")?)?,
            hub_token: text("HF_TOKEN")?.or_else(|| token_file.token()).map(AccessToken),
            hub_offline: flag("HF_HUB_OFFLINE", text("HF_HUB_OFFLINE")?)?,
            hub_timeout: seconds("HEADWAY_HUB_TIMEOUT", text("HEADWAY_HUB_TIMEOUT")?)?,
            ca_file: get("SSL_CERT_FILE").map(PathBuf::from),
            pip_command: ["python3", "-m", "pip"].map(OsString::from).to_vec(),
            pip_silence: DEFAULT_PIP_SILENCE,
        })
    }

    /// The pip command as one line, for messages.
    pub(super) fn pip_display(&self) -> String {
        let words: Vec<_> = self.pip_command.iter().map(|word| word.to_string_lossy()).collect();
        format!("{} download", words.join(" "))
    }

    /// The folder of the GGUF files.
    pub(super) fn models_dir(&self) -> PathBuf {
        self.cache_dir.join("models")
    }
}

fn bad(name: &'static str, value: String, expected: &'static str) -> SourceError {
    SourceError::BadOption { name, value, expected }
}

fn no_home(name: &'static str) -> SourceError {
    bad(name, String::new(), "must name a folder, because neither XDG_CACHE_HOME nor HOME is set")
}

fn endpoint(value: Option<String>) -> Result<String, SourceError> {
    let value = value.unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
    let trimmed = value.trim_end_matches('/');
    if trimmed.starts_with("http://") || trimmed.starts_with("https://") {
        Ok(trimmed.to_owned())
    } else {
        Err(bad("HF_ENDPOINT", value, "must start with http:// or https://"))
    }
}

fn flag(name: &'static str, value: Option<String>) -> Result<bool, SourceError> {
    let Some(value) = value else { return Ok(false) };
    match value.to_ascii_lowercase().as_str() {
        "1" | "on" | "yes" | "true" => Ok(true),
        "0" | "off" | "no" | "false" => Ok(false),
        _ => Err(bad(name, value, "must be 1 or 0")),
    }
}

fn seconds(name: &'static str, value: Option<String>) -> Result<Duration, SourceError> {
    let Some(value) = value else { return Ok(DEFAULT_HUB_TIMEOUT) };
    match value.trim().parse::<f64>() {
        Ok(number) if (0.1..=86_400.0).contains(&number) => Ok(Duration::from_secs_f64(number)),
        _ => Err(bad(name, value, "must be a number of seconds from 0.1 to 86400")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(pairs: &[(&str, &str)]) -> Result<FetchOptions, SourceError> {
        FetchOptions::from_lookup(|name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn folders_follow_the_environment() {
        let home = options(&[("HOME", "/h")]).unwrap();
        assert_eq!(home.cache_dir, PathBuf::from("/h/.cache/headway"));
        assert_eq!(home.hub_cache_dir, PathBuf::from("/h/.cache/huggingface/hub"));
        let xdg = options(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/f")]).unwrap();
        assert_eq!(xdg.cache_dir, PathBuf::from("/x/headway"));
        assert_eq!(xdg.hub_cache_dir, PathBuf::from("/f/hub"));
        let own = options(&[("HOME", "/h"), ("HEADWAY_CACHE_DIR", "/c")]).unwrap();
        assert_eq!(own.models_dir(), PathBuf::from("/c/models"));
        assert!(options(&[]).unwrap_err().to_string().contains("HEADWAY_CACHE_DIR"));
    }

    #[test]
    fn hub_settings_are_read_and_checked() {
        let set = [
            ("HOME", "/h"),
            ("HF_ENDPOINT", "http://127.0.0.1:9/"),
            ("HF_TOKEN", "secret"),
            ("HF_HUB_OFFLINE", "1"),
            ("HEADWAY_HUB_TIMEOUT", "2.5"),
        ];
        let read = options(&set).unwrap();
        assert_eq!(read.hub_endpoint, "http://127.0.0.1:9");
        assert_eq!(read.hub_token, Some(AccessToken("secret".to_owned())));
        assert!(!format!("{read:?}").contains("secret"));
        assert!(read.hub_offline);
        assert_eq!(read.hub_timeout, Duration::from_millis(2500));
        for (name, value) in [
            ("HEADWAY_HUB_TIMEOUT", "0"),
            ("HEADWAY_HUB_TIMEOUT", "soon"),
            ("HF_ENDPOINT", "hub"),
            ("HF_HUB_OFFLINE", "2"),
        ] {
            let message = options(&[("HOME", "/h"), (name, value)]).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains(value), "{message}");
        }
    }
}
